"""Keep the source alone and gather each batch from a strided view of it; pay one gather per batch.

Peak: the source plus one batch. The view shares the source's memory (numpy `sliding_window_view`), and indexing it
copies only the chosen windows; `np.take` on such a view would copy all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl


def on_any(parts: Parts) -> Parts:
    return indexed(parts, lambda rows, source: view(rows, source.window, source.stride))


def indexed(
    parts: Parts,
    windowed: Callable[[Any, Source], Any],
    pick: Callable[[Any, Any], Any] = lambda rows_NW, indices_B: rows_NW[indices_B],
) -> Parts:
    """Prepare inputs and targets by `windowed(rows, source)`, and `pick(windows, indices_B)` each batch of them."""

    def windows(parts: Parts, source: Source) -> Windows:
        x_NW, y_NW = windowed(source.inputs, source), windowed(source.targets, source)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            return pick(x_NW, indices_B), pick(y_NW, indices_B)

        return Windows(source, batch)

    return replace(parts, windows=windows)


def view(rows: Any, window: int, stride: int = 1) -> Any:
    """Return all windows [N, W ...] as a view of the rows [n ...]."""
    import numpy as np
    from numpy.lib.stride_tricks import sliding_window_view

    return np.moveaxis(sliding_window_view(rows, window, axis=0)[::stride], -1, 1)  # numpy puts the window last


def holds(extent: Extent) -> Holding:
    """Count nothing: the batch that is handed out is the loop's."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("strided_view", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
