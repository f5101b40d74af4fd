"""Let the largest batch of an epoch come second, and the others in their order; pay nothing but their order.

No document changes its batch. Peak: the same, but at the second step and not at the eight hundredth: a run that does
not fit fails at once. The first step would be too early, as the moments of the optimizer are made in its update. torch
only: a step of JAX is compiled for one size, to which every batch is padded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl

SECOND = 1


def on_torch(parts: Parts) -> Parts:
    inner = parts.order

    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        order_N = np.array(inner(parts, source, epoch)(0, source.count), np.int64)
        whole = source.count // source.batch
        if epoch or whole <= SECOND:
            return lambda start, stop: order_N[start:stop]
        batches_MB = order_N[: whole * source.batch].reshape(whole, source.batch)
        size = parts.windows(parts, source).size
        assert size is not None
        sizes = [size(each) for each in batches_MB]
        largest = max(range(whole), key=lambda at: sizes[at][0] * sizes[at][1])
        others = [at for at in range(whole) if at != largest]
        batches_MB[:] = batches_MB[[*others[:SECOND], largest, *others[SECOND:]]]
        return lambda start, stop: order_N[start:stop]

    return replace(parts, order=order)


def holds(extent: Extent) -> Holding:
    """Count the order of an epoch, as if each document were as long as the window."""
    return Holding(batches=8 * extent.count)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "longest_first",
            rewrites=("order",),
            on={"torch": on_torch},
            about=__doc__,
            feeds="reordered",
            data="documents",
            holds=holds,
            conflicts={"before bucketed_lengths": "that shuffles batches, the longest among them: name it after"},
        )
    ]
