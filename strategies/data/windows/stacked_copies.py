"""Copy every window into a list and make one array of the list; pay all windows twice while it is made.

Peak: the source plus twice the N W elements of inputs (the list and the array), or of targets where they take more;
then N W elements of each. A negative control: `np.array([...])` of a list, as loaders are often written.
"""

from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl
from strategies.data.windows.list_of_views import ARRAY, AXIS, SLOT, slices
from strategies.data.windows.strided_view import indexed

NOTED = 32  # bytes that `np.array` notes of each item until it knows the shape


def on_any(parts: Parts) -> Parts:
    def stacked(rows: Any, source: Source) -> Any:
        import numpy as np

        return np.array([view.copy() for view in slices(rows, source)])

    return indexed(parts, stacked)


def holds(extent: Extent) -> Holding:
    """Count the arrays, and beside them the list of inputs (before there are targets) or of targets."""
    slots = extent.count * (SLOT + ARRAY + AXIS + NOTED)
    x = extent.count * extent.window * extent.input_bytes
    y = extent.count * extent.window * (extent.target_bytes or extent.input_bytes)
    return Holding(windows=x + y, making=max(x + slots - y, y + slots))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("stacked_copies", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
