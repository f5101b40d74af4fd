"""Slice each window of a batch from the source by a call of its own and stack them; pay Python per window.

Peak: the source plus one batch, whose windows are views until they are stacked. It is the lazy way as loaders are first
written, a list of slices a batch; `strided_view` gathers the same batch by one call.
"""

from typing import Any, NamedTuple

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl
from strategies.data.windows.strided_view import indexed


class Rows(NamedTuple):
    """Rows [n ...], and how windows lie in them."""

    rows: Any
    window: int
    stride: int


def on_any(parts: Parts) -> Parts:
    return indexed(parts, whole, sliced)


def whole(rows: Any, source: Source) -> Rows:
    return Rows(rows, source.window, source.stride)


def sliced(rows: Rows, indices_B: Any) -> Any:
    """Stack the windows of a batch [B, W ...]."""
    import numpy as np

    starts = (indices_B * rows.stride).tolist()
    return np.stack([rows.rows[start : start + rows.window] for start in starts])


def holds(extent: Extent) -> Holding:
    """Count nothing: the batch that is handed out is the loop's."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("stacked_slices", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
