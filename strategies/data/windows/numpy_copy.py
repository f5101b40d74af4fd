"""Copy every window into two preallocated arrays up front; pay the overlap, window / stride times the source.

Peak: the source plus 2 N W elements for inputs and targets; integers take 4 bytes each.
"""

from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, hookimpl
from strategies.data.windows.strided_view import indexed


def on_any(parts: Parts) -> Parts:
    return indexed(parts, copied)


def copied(rows: Any, source: Source) -> Any:
    """Copy all windows [N, W ...] into one array, integers as int32."""
    import numpy as np

    dtype = np.int32 if rows.dtype.kind in "iu" else rows.dtype
    rows_NW = np.empty((source.count, source.window, *rows.shape[1:]), dtype)
    for index in range(source.count):
        start = index * source.stride
        rows_NW[index] = rows[start : start + source.window]
    return rows_NW


def holds(extent: Extent) -> Held:
    elements = max(4, extent.input_bytes) + max(4, extent.target_bytes or extent.input_bytes)
    return Held(windows=extent.count * extent.window * elements)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("numpy_copy", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
