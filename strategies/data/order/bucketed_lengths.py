"""Put documents of like lengths into one batch; pay an order that is random within `pool` batches alone.

The documents of `pool` batches in the order of the other parts are sorted by length and cut into batches, which then
come in random order. What fills no batch is left out as it would be without: what the order of the other parts has
last. Peak: still B times the longest, in a batch where nearly all is text; what is saved is the padding, its time and
the peak of the other batches. Transformers' `group_by_length` sorts so, in pools of 50. torch only: a step of JAX is
compiled for one size, to which every batch is padded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Documents, Extent, Holding, Parts, Source, Strategy, hookimpl


def on_torch(parts: Parts, pool: int = 50) -> Parts:
    if pool < 1:
        raise ValueError(f"bucketed_lengths: documents of {pool} batches cannot be sorted: set pool to 1 or more")
    inner = parts.order

    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        assert isinstance(source, Documents)
        lengths_N = source.lengths_N
        order_N = np.asarray(inner(parts, source, epoch)(0, source.count), np.int64)
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(source.seed, spawn_key=(epoch,))))
        whole = len(order_N) // source.batch
        batched = order_N[: whole * source.batch]  # else what fills no batch would always be the shortest
        for start in range(0, len(batched), pool * source.batch):
            pooled = batched[start : start + pool * source.batch]
            pooled[:] = pooled[np.argsort(-lengths_N[pooled], kind="stable")]
        random.shuffle(batched.reshape(whole, source.batch))
        return lambda start, stop: order_N[start:stop]

    return replace(parts, order=order)


def holds(extent: Extent, pool: int = 50) -> Holding:
    """Count the order of an epoch, as if each document were as long as the window."""
    return Holding(batches=8 * extent.count)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "bucketed_lengths",
            rewrites=("order",),
            on={"torch": on_torch},
            about=__doc__,
            probe={"pool": 3},
            feeds="reordered",
            data="documents",
            holds=holds,
        )
    ]
