"""Gather each batch with np.take from a strided view; pay a copy of all windows for every batch.

Peak: the source, and N W elements of inputs (or of targets, where they take more) whenever a batch is read. A negative
control: `np.take` makes its source contiguous first, where plain indexing of the same view reads the batch alone.
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
            at_B = source.checked(indices_B)
            return np.take(x_NW, at_B, axis=0), np.take(y_NW, at_B, axis=0)

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Held:
    return Held(batches=extent.count * extent.window * max(extent.input_bytes, extent.target_bytes))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("take_from_view", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
