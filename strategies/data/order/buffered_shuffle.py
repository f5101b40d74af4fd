"""Keep a buffer of the next windows and give out a random one of them; pay with windows that come near their place.

Peak: 8 bytes for each of the `size` windows in the buffer. It is filled before the first is given out; then each one
that leaves is replaced by the next of the source, until none is left. Readers that cannot seek shuffle like this
(tf.data, WebDataset). The positions of an epoch come one after the other, so that to ask for an earlier one, or to
resume, plays the epoch again from its start.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, hookimpl

BLOCK = 1 << 16
"""How many positions are passed over at once on the way to a later one."""


class Buffer:
    """The windows of one epoch that may come next; `position` counts those that were given out."""

    def __init__(self, count: int, size: int, generator: Any) -> None:
        self.count, self.generator, self.position = count, generator, 0
        self.waiting = array("q", range(min(size, count)))

    def take(self, number: int) -> Any:
        """Give out the next `number` windows."""
        import numpy as np

        waiting, size, taken_K = self.waiting, len(self.waiting), np.empty(number, np.int64)
        # one number each, whatever is asked for at a time: the order must not depend on that
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


def holds(extent: Extent, size: int = 10000) -> Held:
    """Hold an index for each window in the buffer."""
    return Held(batches=8 * min(size, extent.count))


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
