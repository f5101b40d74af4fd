"""Move the rows to the device once and gather each batch there; pay the rows on the device, and no transfers.

Peak: the source and one batch on the device, and the source on the host. On the CPU torch shares the memory of both,
and JAX does if the rows begin at a multiple of 64 bytes. Source: index-batching on the GPU, PGT-I (SC 2025).

Offsets are checked on the host, since JAX silently moves offsets beyond the end back.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows import jax_gather
from strategies.data.windows.torch_unfold import flat_view


def on_torch(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import torch

        device = parts.place.device
        rows = source.joined
        pairs = [(source.inputs, 0), (source.targets, 0)] if rows is None else [(rows, 0), (rows, 1)]
        views = {id(rows): on_device(rows, source.window, device) for rows, _ in pairs}

        def batch(indices_B: Any) -> tuple[Any, Any]:
            starts_B = torch.from_numpy(source.starts(indices_B))
            if device == "cuda":  # a copy from other memory would wait for the whole step
                starts_B = starts_B.pin_memory().to(device, non_blocking=True)
            x, y = (gathered(views[id(rows)], rows, source.window, starts_B + later) for rows, later in pairs)
            return x, y

        return Windows(source, batch)

    return replace(parts, windows=windows)


def on_device(rows: Any, window: int, device: str) -> Any:
    """Move rows to a torch device, as a strided view [n - W + 1, W ...] of them.

    Raises ValueError for rows that are not contiguous. Ids become signed, since torch has no `index_select` of unsigned
    16 bits.
    """
    if not rows.flags.c_contiguous:
        raise ValueError("device_resident: the rows are not contiguous; leave out the strategy that cuts columns")
    return flat_view(rows, window, signed(rows.dtype), device)


def signed(dtype: Any) -> Any:
    """Return the signed type of the same width for an unsigned one of two bytes or more, any other type as it is."""
    import numpy as np

    return np.dtype(f"i{dtype.itemsize}") if dtype.kind == "u" and dtype.itemsize > 1 else dtype


def gathered(view: Any, rows: Any, window: int, starts_B: Any) -> Any:
    """Gather windows [B, W ...] in the type of the rows."""
    import torch

    rows_BW = torch.index_select(view, 0, starts_B).view(-1, window, *rows.shape[1:])
    return rows_BW if signed(rows.dtype) == rows.dtype else rows_BW.view(getattr(torch, rows.dtype.name))


def on_jax(parts: Parts) -> Parts:
    return jax_gather.on_jax(parts)


def holds(extent: Extent) -> Holding:
    """Count the rows once more in JAX, whose device is the CPU here; torch shares them."""
    rows = 0 if extent.backend == "torch" else jax_gather.rows_bytes(extent)
    return Holding(windows=rows, batches=8 * extent.batch * extent.window)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [Strategy("device_resident", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
