"""Keep the source and one numpy view object per window; pay some 120 bytes for each and Python for every window.

Peak: the source plus 2 N (112 + 8) bytes, 16 more where rows are vectors, for views and the slots that point at them.
The data itself is never copied but for the batch. This is a list of slices in numpy, as it is often written.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl

SLOT, ARRAY, AXIS = 8, 96, 16  # bytes: in a list, of an array object, of each of its dimensions


def on_any(parts: Parts) -> Parts:
    return listed(parts, lambda view: view)


def listed(parts: Parts, keep: Callable[[Any], Any]) -> Parts:
    """Keep something of each window, cut as a view of the rows, in a list."""

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        def kept(rows: Any) -> list[Any]:
            starts = range(0, source.count * source.stride, source.stride)
            return [keep(rows[start : start + source.window]) for start in starts]

        xs, ys = kept(source.inputs), kept(source.targets)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            chosen = source.checked(indices_B).tolist()
            return np.stack([xs[index] for index in chosen]), np.stack([ys[index] for index in chosen])

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Held:
    vectors = extent.input_bytes > 8
    return Held(windows=extent.count * (2 * (SLOT + ARRAY + AXIS) + AXIS * vectors))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("list_of_views", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
