"""Keep copies of the next windows and take random ones of them; pay the overlap of the copies.

Peak: `size` windows of inputs and targets and nothing of the file: `window / stride` times the block of rows that mixes
as well (see `streaming`). The file is read from its beginning to its end, and shuffled as by `buffered_shuffle`.
Source: the shuffle buffers of WebDataset and tf.data, which see samples one after the other.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl, rows_on_disk
from strategies.data.order import buffered_shuffle


def on_any(parts: Parts, size: int = 10000) -> Parts:
    if size < 1:
        raise ValueError(f"reservoir: a buffer of {size} holds nothing: set size to 1 or more")

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        copies: dict[int, tuple[Any, Any]] = {}
        read = 0

        def window(index: int) -> tuple[Any, Any]:
            first = index * source.stride
            rows = slice(first, first + source.window)
            return np.asarray(source.inputs[rows]).copy(), np.asarray(source.targets[rows]).copy()

        def taken(index: int) -> tuple[Any, Any]:
            nonlocal read
            if index not in copies and index < read:
                read = 0  # it was taken before, so this is the next epoch
                copies.clear()
            while index not in copies and read < source.count and len(copies) < size:
                copies[read] = window(read)
                read += 1
            return copies.pop(index) if index in copies else window(index)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            pairs = [taken(index) for index in source.checked(indices_B).tolist()]
            return np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])

        return Windows(source, batch)

    return replace(buffered_shuffle.on_any(parts, size), rows=rows_on_disk.on_disk, windows=windows)


def holds(extent: Extent, size: int = 10000) -> Holding:
    copy = extent.window_bytes + 2 * 112 + 8  # two arrays and their headers
    return Holding(source=0, batches=min(size, extent.count) * (copy + 8) + extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "reservoir",
            rewrites=("rows", "windows", "order"),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            probe={"size": 4},
            feeds="reordered",
            holds=holds,
        )
    ]
