"""Shuffle the chunks, and mix the windows of a few chunks at a time; pay with neighbours that stay close together.

Peak: 8 bytes for each of the N / C chunks and for each of the `held` C windows that are mixed together. Every epoch
draws the chunks in another order, and takes the windows of `held` chunks in random order before it goes on, so that
only these chunks are needed at a time. `chunk` is C, in windows. MosaicML's py1s and LitData shuffle in this way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl


def on_any(parts: Parts, chunk: int = 65536, held: int = 2) -> Parts:
    if chunk < 1 or held < 1:
        raise ValueError(f"chunked_shuffle: chunk and held must be at least 1, not {chunk} and {held}")

    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        def generator(*key: int) -> Any:
            return np.random.Generator(np.random.PCG64(np.random.SeedSequence(source.seed, spawn_key=(epoch, *key))))

        count = source.count
        chunks_K = generator().permutation(-(-count // chunk))
        sizes_K = np.minimum(chunk, count - chunks_K * chunk)  # the last chunk of the source may be short
        ends_G = np.add.reduceat(sizes_K, np.arange(0, len(chunks_K), held)).cumsum()
        del sizes_K
        newest: dict[int, Any] = {}

        def mixed(group: int) -> Any:
            if group not in newest:
                newest.clear()
                starts = chunks_K[group * held : (group + 1) * held] * chunk
                order_M = np.concatenate([np.arange(start, min(start + chunk, count)) for start in starts])
                generator(group).shuffle(order_M)
                newest[group] = order_M
            return newest[group]

        def at(start: int, stop: int) -> Any:
            pieces, stop = [np.empty(0, np.int64)], min(stop, count)
            while start < stop:
                group = int(np.searchsorted(ends_G, start, side="right"))
                order_M, end = mixed(group), int(ends_G[group])
                first = end - len(order_M)
                pieces.append(order_M[start - first : stop - first])
                start = end
            return np.concatenate(pieces)

        return at

    return replace(parts, order=order)


def holds(extent: Extent, chunk: int = 65536, held: int = 2) -> Holding:
    """Count an index for each chunk, the ends of the groups, and an index for each window of one group."""
    chunks = -(-extent.count // chunk)
    return Holding(batches=8 * (chunks + -(-chunks // held) + min(held * chunk, extent.count)))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "chunked_shuffle",
            rewrites=("order",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            probe={"chunk": 3, "held": 2},
            feeds="reordered",
            holds=holds,
        )
    ]
