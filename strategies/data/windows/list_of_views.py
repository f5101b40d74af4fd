"""Keep the source and one numpy view object per window; pay some 120 bytes for each and Python for every window.

Peak: the source plus 2 N (112 + 8) bytes, 16 more where rows are vectors, for the views and the slots of the list. Only
the batch is copied. This is the list of slices that loaders in numpy often make.
"""

from collections.abc import Callable, Iterator
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl
from strategies.data.windows.strided_view import indexed

SLOT, ARRAY, AXIS = 8, 96, 16  # bytes: in a list, of an array object, of each of its dimensions


def on_any(parts: Parts) -> Parts:
    return listed(parts, lambda view: view)


def listed(parts: Parts, item: Callable[[Any], Any]) -> Parts:
    """Keep `item(view)` of each window, a view of the rows, in a list."""

    def windowed(rows: Any, source: Source) -> list[Any]:
        return [item(view) for view in slices(rows, source)]

    def pick(items: list[Any], indices_B: Any) -> Any:
        import numpy as np

        return np.stack([items[index] for index in indices_B.tolist()])

    return indexed(parts, windowed, pick)


def slices(rows: Any, source: Source, first: int = 0) -> Iterator[Any]:
    """Yield the rows of every window, sliced from an array or a list; those of the first window begin at `first`."""
    for start in range(first, first + source.count * source.stride, source.stride):
        yield rows[start : start + source.window]


def holds(extent: Extent) -> Holding:
    vectors = extent.input_bytes > 8
    return Holding(windows=extent.count * (2 * (SLOT + ARRAY + AXIS) + AXIS * vectors))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("list_of_views", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
