"""Keep the source alone and gather each batch from a strided view of it; pay one gather per batch.

Peak: the source plus one batch. The view shares the source's memory (numpy `sliding_window_view`), and indexing it
copies only the windows asked for; `np.take` on such a view would copy all of them.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl


def on_any(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np
        from numpy.lib.stride_tricks import sliding_window_view

        def view(rows: Any) -> Any:
            windowed = sliding_window_view(rows, source.window, axis=0)[:: source.stride]
            return np.moveaxis(windowed, -1, 1)  # numpy puts the window last

        x_NW, y_NW = view(source.inputs), view(source.targets)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            return x_NW[indices_B], y_NW[indices_B]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Held:
    """Hold nothing: the batch that is handed out is the loop's."""
    return Held()


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("strided_view", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
