"""Gather each batch with np.take from a strided view; pay a copy of all windows for every batch.

Peak: the source, and N W elements of inputs (or of targets, where they take more) whenever a batch is read. A negative
control: `np.take` makes its source contiguous first, where plain indexing of the same view reads the batch alone.
"""

from harness import Extent, Holding, Parts, Strategy, hookimpl
from strategies.data.windows.strided_view import indexed, view


def on_any(parts: Parts) -> Parts:
    import numpy as np

    return indexed(
        parts,
        lambda rows, source: view(rows, source.window, source.stride),
        lambda rows_NW, indices_B: np.take(rows_NW, indices_B, axis=0),
    )


def holds(extent: Extent) -> Holding:
    return Holding(fetching=extent.count * extent.window * max(extent.input_bytes, extent.target_bytes))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("take_from_view", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
