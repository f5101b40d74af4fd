"""Read the windows of each batch from the file, neighbours in one call; pay system calls and copies.

Peak: one batch more, and the longest stretch that is read at once. No page is mapped, so nothing counts as file-backed:
the kernel's cache does not belong to the process. Starts are sorted, and windows less than `gap` windows apart are read
together.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl, knobs, rows_on_disk


def on_any(parts: Parts, gap: int = 1) -> Parts:
    knobs.at_least_0("pread", gap=gap)

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        def gathered(rows: Any, starts_B: Any) -> Any:
            windows_BW = np.empty((len(starts_B), source.window, *rows.shape[1:]), rows.dtype)
            ranks = np.argsort(starts_B, kind="stable")
            for first, last in stretches(starts_B[ranks], source.window, gap):
                begin, end = int(starts_B[ranks[first]]), int(starts_B[ranks[last - 1]]) + source.window
                stretch = np.asarray(rows[begin:end])
                for rank in ranks[first:last]:
                    start = int(starts_B[rank]) - begin
                    windows_BW[rank] = stretch[start : start + source.window]
            return windows_BW

        def batch(indices_B: Any) -> tuple[Any, Any]:
            starts_B = source.starts(indices_B)
            return gathered(source.inputs, starts_B), gathered(source.targets, starts_B)

        return Windows(source, batch)

    return replace(parts, rows=rows_on_disk.on_disk, windows=windows)


def stretches(starts_B: Any, window: int, gap: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of sorted starts whose windows lie less than `gap` windows apart."""
    first = 0
    for at in range(1, len(starts_B) + 1):
        if at == len(starts_B) or starts_B[at] - starts_B[at - 1] >= window * (1 + gap):
            yield first, at
            first = at


def holds(extent: Extent, gap: int = 1) -> Holding:
    return Holding(source=0, batches=extent.row_bytes * extent.read(extent.batch))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy("pread", rewrites=("rows", "windows"), on={"torch": on_any, "jax": on_any}, about=__doc__, holds=holds)
    ]
