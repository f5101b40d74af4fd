"""Copy every window into two preallocated arrays up front; pay the overlap, window / stride times the source.

Peak: the source plus 2 N W elements for inputs and targets; integers take 4 bytes each. `of_list` fills the arrays from
a Python list of the rows, as loaders do whose tokenizer returns one; it is made first, and takes 8 bytes for each token
while it is there, and 32 more for an id above 256.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows import list_of_views, python_lists
from strategies.data.windows.strided_view import indexed


def on_any(parts: Parts, of_list: bool = False) -> Parts:
    if not of_list:
        return indexed(parts, lambda rows, source: copied(list_of_views.slices(rows, source), rows, source))

    def windows(parts: Parts, source: Source) -> Windows:
        x_windows, y_windows = python_lists.of_one_list(source)
        x_NW, y_NW = copied(x_windows, source.inputs, source), copied(y_windows, source.targets, source)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            return x_NW[indices_B], y_NW[indices_B]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def copied(windows: Iterable[Any], rows: Any, source: Source) -> Any:
    """Copy all windows of rows into one array [N, W ...], integers as int32."""
    import numpy as np

    dtype = np.int32 if rows.dtype.kind in "iu" else rows.dtype
    rows_NW = np.empty((source.count, source.window, *rows.shape[1:]), dtype)
    for index, window in enumerate(windows):
        rows_NW[index] = window
    return rows_NW


def holds(extent: Extent, of_list: bool = False) -> Holding:
    elements = max(4, extent.input_bytes) + max(4, extent.target_bytes or extent.input_bytes)
    windows = extent.count * extent.window * elements
    if not of_list:
        return Holding(windows=windows)
    rows, labels, supposes = python_lists.objects(extent)
    inputs, targets = (extent.rows * (python_lists.SLOT + size) for size in (rows, labels))
    if not extent.target_bytes:
        return Holding(windows=windows, making=int(inputs), supposes=supposes)
    copied_targets = extent.count * extent.window * max(4, extent.target_bytes)
    return Holding(windows=windows, making=int(max(inputs + targets - copied_targets, targets)), supposes=supposes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("numpy_copy", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
