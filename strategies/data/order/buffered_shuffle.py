"""Take each window at random from a buffer of the next ones; pay with windows that stay near their place.

Peak: 8 bytes for each of the `size` windows in the buffer. The buffer is filled first; then each window that leaves is
replaced by the next of the source, until none is left. Readers that cannot seek shuffle like this (tf.data,
WebDataset). The positions of an epoch come one after the other: an earlier position, or a run that resumes, repeats the
epoch from its start.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl

BLOCK = 1 << 16
"""The positions that are skipped at once on the way to a later one."""


class Buffer:
    """The windows of one epoch that may come next; `position` counts those that have left."""

    def __init__(self, count: int, size: int, generator: Any) -> None:
        self.count, self.generator, self.position = count, generator, 0
        self.waiting = array("q", range(min(size, count)))

    def take(self, number: int) -> Any:
        """Return the next `number` windows."""
        import numpy as np

        waiting, size, taken_K = self.waiting, len(self.waiting), np.empty(number, np.int64)
        # One draw for each window: the order must not depend on how many are taken at a time.
        draws = self.generator.random(number).tolist()
        for index, draw in enumerate(draws):
            incoming = self.position + size
            at = int(draw * min(size, self.count - self.position))
            taken_K[index] = waiting[at]
            waiting[at] = incoming if incoming < self.count else waiting[self.count - self.position - 1]
            self.position += 1
        return taken_K


def on_any(parts: Parts, size: int = 10000) -> Parts:
    if size < 1:
        raise ValueError(f"buffered_shuffle: a buffer of {size} holds nothing: set size to 1 or more")

    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        count = source.count

        def begin() -> Buffer:
            seeds = np.random.SeedSequence(source.seed, spawn_key=(epoch,))
            return Buffer(count, size, np.random.Generator(np.random.PCG64(seeds)))

        buffer = begin()

        def at(start: int, stop: int) -> Any:
            nonlocal buffer
            stop = min(stop, count)
            if start >= stop:
                return np.empty(0, np.int64)
            if start < buffer.position:
                buffer = begin()
            while buffer.position < start:
                buffer.take(min(BLOCK, start - buffer.position))
            return buffer.take(stop - start)

        return at

    return replace(parts, order=order)


def holds(extent: Extent, size: int = 10000) -> Holding:
    """Count an index for each window in the buffer."""
    return Holding(batches=8 * min(size, extent.count))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "buffered_shuffle",
            rewrites=("order",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            probe={"size": 4},
            feeds="reordered",
            holds=holds,
        )
    ]
