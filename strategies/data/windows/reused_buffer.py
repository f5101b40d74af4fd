"""Gather each batch into one of a few buffers, used in turn; a batch is overwritten after `slots` more.

Peak: the source plus `slots` batches, in the types of the source. No batch is allocated, so no pages are faulted in,
which would cost more than the copy itself. Source: loaders with a ring of shared buffers, as in grain.

With torch, windows are gathered by one `index_select` over a flat strided view of contiguous rows. Elsewhere, large
windows are copied one by one, and small ones some at a time through an array that stays in the processor's cache. A
batch of more windows than the source's is an array of its own. In JAX on a CPU a batch may lie in the buffer itself: a
loop of your own has to wait for each step, as that of the harness does, or a batch is overwritten while it is read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows.strided_view import view
from strategies.data.windows.torch_unfold import flat_view

LARGE = 4096
"""Bytes of a window from which one copy for it costs less than a detour: the call takes 0.2 microseconds."""
DETOUR = 1 << 15
"""Bytes of small windows that are gathered at a time."""

Gather = Callable[[Any, Any], None]


def reused(make: Callable[[Any, Source], Gather], parts: Parts, slots: int) -> Parts:
    """Gather inputs and targets into rings of buffers by the `gather(starts_B, out)` of `make(rows, source)`."""
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
            arrays = []
            for gather, ring in both:
                out = ring[slot, :size] if size <= source.batch else np.empty((size, *ring.shape[2:]), ring.dtype)
                gather(starts_B, out)
                arrays.append(out)
            return arrays[0], arrays[1]

        return Windows(source, batch, lasts=slots)

    return replace(parts, windows=windows)


def buffers(rows: Any, source: Source, slots: int) -> Any:
    """Allocate a ring of batches, and touch every page of it."""
    import numpy as np

    ring = np.empty((slots, source.batch, source.window, *rows.shape[1:]), rows.dtype)
    ring.fill(0)
    return ring


def one_by_one(rows: Any, source: Source) -> Gather:
    """Gather with numpy alone, from rows of any layout."""
    windows = view(rows, source.window)
    size = source.window * (rows.nbytes // len(rows))
    some = max(1, DETOUR // size)

    def copy(starts_B: Any, out: Any) -> None:
        for window, start in enumerate(starts_B.tolist()):
            out[window] = rows[start : start + source.window]

    def detour(starts_B: Any, out: Any) -> None:
        for first in range(0, len(starts_B), some):
            out[first : first + some] = windows[starts_B[first : first + some]]

    return copy if size >= LARGE else detour


def selected(rows: Any, source: Source) -> Gather:
    """Gather with torch; rows that are not contiguous are left to numpy."""
    import torch

    bits = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}.get(rows.dtype.itemsize)  # no index_select of unsigned 16 bits
    if not rows.flags.c_contiguous or bits is None:
        return one_by_one(rows, source)
    windows = flat_view(rows, source.window, bits)

    def gather(starts_B: Any, out: Any) -> None:
        flat = torch.from_numpy(out.reshape(len(out), -1).view(bits))
        torch.index_select(windows, 0, torch.from_numpy(starts_B), out=flat)

    return gather


def on_torch(parts: Parts, slots: int = 4) -> Parts:
    return reused(selected, parts, slots)


def on_jax(parts: Parts, slots: int = 4) -> Parts:
    return reused(one_by_one, parts, slots)


def holds(extent: Extent, slots: int = 4) -> Holding:
    return Holding(windows=slots * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [Strategy("reused_buffer", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
