"""Keep the source alone and gather each batch from a strided view of it; pay one gather per batch.

Peak: the source plus one batch. The view shares the source's memory (numpy `sliding_window_view`), and indexing it
copies only the windows asked for; `np.take` on such a view would copy all of them.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Source, Strategy, Windows, hookimpl


def on_any(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        from numpy.lib.stride_tricks import sliding_window_view

        def view(rows: Any) -> Any:
            windowed = sliding_window_view(rows, source.window, axis=0)[:: source.stride]
            return windowed.swapaxes(1, -1) if rows.ndim == 2 else windowed  # numpy puts the window last

        x_NW, y_NW = view(source.inputs), view(source.targets)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            return x_NW[indices_B], y_NW[indices_B]

        return Windows(source, batch)

    return replace(parts, windows=windows)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("strided_view", rewrites=("windows",), on={"torch": on_any, "jax": on_any}, about=__doc__)]
