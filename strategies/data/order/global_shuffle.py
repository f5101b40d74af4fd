"""Keep one index per window and take each epoch in a random permutation of all of them; pay 4 N bytes.

Peak: 4 N bytes of indices, 8 N where there are more than 2^32 windows. Every permutation is equally likely. It follows
from the seed and the epoch (numpy PCG64, Fisher and Yates), so a run can resume within an epoch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl

NARROW = 1 << 32
"""The most windows that an index of 4 bytes can number."""


def on_any(parts: Parts) -> Parts:
    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        order_N = np.arange(source.count, dtype=np.uint32 if source.count <= NARROW else np.int64)
        np.random.Generator(np.random.PCG64(np.random.SeedSequence([source.seed, epoch]))).shuffle(order_N)
        return lambda start, stop: order_N[start:stop]

    return replace(parts, order=order)


def holds(extent: Extent) -> Holding:
    """Count an index for each window."""
    return Holding(batches=extent.count * (4 if extent.count <= NARROW else 8))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("global_shuffle", rewrites=("order",), on=on, about=__doc__, feeds="reordered", holds=holds)]
