"""Copy every window into a list and make one array of the list; pay all windows twice while it is made.

Peak: the source plus twice the N W elements of inputs (the list and the array), or of targets where they take more;
then N W elements of each. A negative control: `np.array([...])` of a list, as loaders are often written.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl

NOTED = 32  # bytes that `np.array` notes of each item until it knows the shape


def on_any(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        def stacked(rows: Any) -> Any:
            starts = range(0, source.count * source.stride, source.stride)
            return np.array([rows[start : start + source.window].copy() for start in starts])

        x_NW, y_NW = stacked(source.inputs), stacked(source.targets)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            return x_NW[indices_B], y_NW[indices_B]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Held:
    """Count the arrays, and beside them the list of inputs (before there are targets) or of targets."""
    from strategies.data.windows.list_of_views import ARRAY, AXIS, SLOT

    slots = extent.count * (SLOT + ARRAY + AXIS + NOTED)
    x = extent.count * extent.window * extent.input_bytes
    y = extent.count * extent.window * (extent.target_bytes or extent.input_bytes)
    return Held(windows=x + y, making=max(x + slots - y, y + slots))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("stacked_copies", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
