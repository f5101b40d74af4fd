"""Gather each batch into one of a few buffers that are used in turn; pay that a batch is overwritten later.

Peak: the source plus `slots` batches, in the types of the source. A batch stays as it was until `slots` more were
asked for. No batch is allocated, so none is paged in afresh: that costs more than the copy itself. Source: loaders with
a ring of shared buffers, as in grain.

With torch, windows are gathered by one `index_select` over a flat strided view of contiguous rows. Elsewhere, large
windows are copied one by one, and small ones some at a time through an array that stays in the cache. A batch of more
windows than the source's is an array of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl

LARGE = 4096
"""Bytes of a window from which a copy of its own costs less than a detour: the call takes 0.2 microseconds."""
DETOUR = 1 << 15
"""Bytes of small windows that are gathered at a time."""

Gather = Callable[[Any, Any], None]


def ring(make: Callable[[Any, Source], Gather], parts: Parts, slots: int) -> Parts:
    """Let `make(rows, source)` give a `gather(starts_B, out)` for inputs and for targets, and hand out the ring."""
    if slots < 1:
        raise ValueError(f"reused_buffer: {slots} slots are too few; give at least 1")

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        both = [(make(rows, source), buffers(rows, source, slots)) for rows in (source.inputs, source.targets)]
        asked = 0

        def batch(indices_B: Any) -> tuple[Any, Any]:
            nonlocal asked
            starts_B = source.starts(indices_B)
            size, slot = len(starts_B), asked % slots
            asked += 1
            found = []
            for gather, held in both:
                out = held[slot, :size] if size <= source.batch else np.empty((size, *held.shape[2:]), held.dtype)
                gather(starts_B, out)
                found.append(out)
            return found[0], found[1]

        return Windows(source, batch, lasts=slots)

    return replace(parts, windows=windows)


def buffers(rows: Any, source: Source, slots: int) -> Any:
    """Allocate a ring of batches, and touch every page of it."""
    import numpy as np

    held = np.empty((slots, source.batch, source.window, *rows.shape[1:]), rows.dtype)
    held.fill(0)
    return held


def one_by_one(rows: Any, source: Source) -> Gather:
    """Gather with numpy alone, from rows of any layout."""
    import numpy as np
    from numpy.lib.stride_tricks import sliding_window_view

    view = np.moveaxis(sliding_window_view(rows, source.window, axis=0), -1, 1)
    size = source.window * (rows.nbytes // len(rows))
    some = max(1, DETOUR // size)

    def copy(starts_B: Any, out: Any) -> None:
        for window, start in enumerate(starts_B.tolist()):
            out[window] = rows[start : start + source.window]

    def detour(starts_B: Any, out: Any) -> None:
        for first in range(0, len(starts_B), some):
            out[first : first + some] = view[starts_B[first : first + some]]

    return copy if size >= LARGE else detour


def selected(rows: Any, source: Source) -> Gather:
    """Gather with torch; a strided view of rows that are not contiguous would read other values."""
    import torch

    from strategies.data.windows.torch_unfold import shared

    bits = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}.get(rows.dtype.itemsize)  # no index_select of unsigned 16 bits
    if not rows.flags.c_contiguous or bits is None:
        return one_by_one(rows, source)
    width = rows[0].size
    flat = shared(rows.reshape(-1).view(bits))
    view = flat.as_strided((len(rows) - source.window + 1, source.window * width), (width, 1))

    def gather(starts_B: Any, out: Any) -> None:
        torch.index_select(
            view, 0, torch.from_numpy(starts_B), out=torch.from_numpy(out.reshape(len(out), -1).view(bits))
        )

    return gather


def on_torch(parts: Parts, slots: int = 4) -> Parts:
    return ring(selected, parts, slots)


def on_jax(parts: Parts, slots: int = 4) -> Parts:
    return ring(one_by_one, parts, slots)


def holds(extent: Extent, slots: int = 4) -> Held:
    return Held(windows=slots * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [Strategy("reused_buffer", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
