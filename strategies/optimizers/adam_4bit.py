"""Keep both moments of Adam as 4-bit codes, two in a byte, with a scale per block of 128; pay coarser rounding.

Peak: 1 + 2 * 4 / 128 bytes of moments for each parameter instead of 8, and while a step is applied a few float32 slices
of 1 Mi elements. The codes are those of Li et al., 2023 (arXiv:2309.01507): of the first moment sixteen levels that lie
evenly within each of three decades, with a sign; of the second sixteen that lie evenly, without a sign and without
zero, since a momentum over nothing would be a step of a thousand learning rates. The scale of a block is its largest
value in both; the paper's scale by rows and columns of a matrix is left out.
Tensors of fewer than `least` elements keep float32 moments, so a model of small tensors saves nothing.

Declared approximate and not of lower precision, as `adam_8bit` is.
"""

from typing import Any

from harness import Strategy, hookimpl
from strategies.optimizers import _coded


def levels(signed: bool) -> Any:
    """Return the 16 values in [-1, 1], or in (0, 1], that the codes stand for, in ascending order."""
    import numpy as np

    if not signed:
        return (np.arange(1, 17) / 16).astype(np.float32)
    values = [0.0, 1.0]
    for decade in range(3):
        edges = np.linspace(0.1, 1, 2**decade + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 2)
        values += [*means, *-means]
    return np.sort(values).astype(np.float32)


CODES = _coded.Codes(levels, block=128, bits=4, least_second=0)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [_coded.strategy("adam_4bit", CODES, __doc__)]
