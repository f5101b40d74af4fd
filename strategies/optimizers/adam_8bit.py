"""Keep both moments of Adam as 8-bit codes with a scale per block of 256; pay rounding of the moments at each step.

Peak: 2 + 2 * 4 / 256 bytes of moments for each parameter instead of 8, and while a step is applied a few float32 slices
of 1 Mi elements. The codes are those of Dettmers et al., 2021 (arXiv:2110.02861): levels that lie evenly within each of
seven decades below the largest value of the block, with a sign for the first moment and without one for the second.
Unlike there a second moment is never rounded to zero but to the least level: where the gradient of an element vanishes,
as in the rows of an embedding, a momentum over nothing would be a step of a thousand learning rates (the zero point of
Li et al., 2023, arXiv:2309.01507).
Tensors of fewer than `least` elements keep float32 moments, so a model of small tensors saves nothing.

Declared approximate and not of lower precision: all arithmetic is in float32, so what a precision may change says
nothing of it. The losses of 20 updates part from the baseline's by more than float32 explains.
"""

from typing import Any

from harness import Strategy, hookimpl
from strategies.optimizers import _coded


def levels(signed: bool) -> Any:
    """Return the 256 values in [-1, 1], or in [0, 1], that the codes stand for, in ascending order."""
    import numpy as np

    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*means, *-means] if signed else [*means]
    return np.sort(values).astype(np.float32)


CODES = _coded.Codes(levels, block=256, bits=8, least_second=1)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [_coded.strategy("adam_8bit", CODES, __doc__)]
