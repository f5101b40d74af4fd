"""Keep a block of rows that moves along the file; pay with a shuffle that mixes only within the block.

Peak: `rows` rows of inputs and targets, or those of one batch where it needs more, whatever the size of the corpus;
where they are shuffled, 24 bytes more for each window of the block, which a prediction counts in any case. The file is
read from its beginning to its end. A source that is shuffled is shuffled within each block: its windows are permuted
among themselves, one block after the other. A batch that spans more than a block is read window by window.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl, knobs, rows_on_disk


def on_any(parts: Parts, rows: int = 65536) -> Parts:
    knobs.above_0("streaming", rows=rows)
    inner_order, inner_windows = parts.order, parts.windows

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        size = min(len(source.inputs), capacity(rows, source))
        x_block, y_block = Block(source.inputs, size), Block(source.targets, size)
        apart = inner_windows(parts, source)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            starts_B = source.starts(indices_B)
            first, last = int(starts_B.min()), int(starts_B.max()) + source.window
            if last - first > size:
                return apart.batch(indices_B)
            offsets_BW = starts_B[:, None] + np.arange(source.window)
            return x_block.rows(first, last)[offsets_BW - first], y_block.rows(first, last)[offsets_BW - first]

        return Windows(source, batch)

    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        if not source.shuffle:
            return inner_order(parts, source, epoch)
        size = max(source.batch, (capacity(rows, source) - source.window) // source.stride + 1)

        @lru_cache(maxsize=2)
        def permuted(number: int) -> Any:
            """Permute the windows of one block, always in the same way."""
            first, last = number * size, min((number + 1) * size, source.count)
            seeds = np.random.SeedSequence([source.seed, epoch, number])
            return first + np.random.Generator(np.random.PCG64(seeds)).permutation(last - first)

        def at(start: int, stop: int) -> Any:
            stop = min(stop, source.count)
            if start >= stop:
                return np.arange(0)
            first, last = start // size, (stop - 1) // size
            indices = np.concatenate([permuted(number) for number in range(first, last + 1)])
            return indices[start - first * size : stop - first * size]

        return at

    return replace(parts, rows=rows_on_disk.on_disk, windows=windows, order=order)


def capacity(rows: int, source: Source | Extent) -> int:
    """Compute the rows of a block: `rows`, or as many as a batch of consecutive windows needs."""
    return max(rows, (source.batch - 1) * source.stride + source.window)


class Block:
    """The rows [first, last) of a file, in one array that is filled again as the block moves on."""

    def __init__(self, source: Any, size: int) -> None:
        import numpy as np

        self.source, self.first, self.last = source, 0, 0
        self.array = np.empty((size, *source.shape[1:]), source.dtype)

    def rows(self, first: int, last: int) -> Any:
        """Return the rows [first, last); if the block lacks some, read as many as fit from `first` on."""
        if not self.first <= first <= last <= self.last:
            self.first, self.last = first, min(len(self.source), first + len(self.array))
            rows_on_disk.fill(self.array[: self.last - self.first], self.source[self.first : self.last])
        return self.array[first - self.first : last - self.first]


def holds(extent: Extent, rows: int = 65536) -> Holding:
    """Count the block; and where windows come in no order two permutations of its windows, and a copy of one."""
    size = min(extent.rows, capacity(rows, extent))
    windows = 0 if extent.in_order else (size - extent.window) // extent.stride + 1
    return Holding(source=0, windows=size * extent.row_bytes, batches=8 * extent.batch * extent.window + 24 * windows)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "streaming",
            rewrites=("rows", "windows", "order"),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            probe={"rows": 5},
            feeds="reordered",
            holds=holds,
        )
    ]
