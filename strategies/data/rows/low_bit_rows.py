"""Store frames in fewer bits than the training uses: narrow them as they are read, widen them batch by batch.

Peak: a half or a quarter of float32 frames, and one wide batch. The wide rows are never in memory at once: files are
read in pieces. Labels stay as they are.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import Extent, Holding, Parts, RowsOnDisk, Strategy, hookimpl, rows_on_disk


class Narrowing(NamedTuple):
    """How rows are stored: `narrow(rows_CF, out)` fills the narrow rows, `widen(x_BWF)` returns float32 again.

    `widen_tensor` does so for a tensor of torch, on its own device.
    """

    narrow: Callable[[Any, Any], None]
    widen: Callable[[Any], Any]
    widen_tensor: Callable[[Any], Any]


def as_float16(rows: RowsOnDisk) -> Narrowing:
    """Round to float16; raise ValueError for a value beyond its range, which would become infinite."""
    import numpy as np

    def narrow(rows_CF: Any, out: Any) -> None:
        with np.errstate(over="ignore"):
            out[:] = rows_CF
        if not np.isfinite(out).all():
            raise ValueError("float16_rows: a value lies beyond 65504; scale the frames, or use bfloat16_rows")

    return Narrowing(narrow, lambda x_BWF: x_BWF.astype(np.float32), lambda x_BWF: x_BWF.float())


def as_bfloat16(rows: RowsOnDisk) -> Narrowing:
    """Keep the upper 16 bits of each float32, rounded to nearest, ties to even: numpy has no such type."""
    import numpy as np

    def narrow(rows_CF: Any, out: Any) -> None:
        bits = rows_CF.astype(np.float32).view(np.uint32)
        out[:] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16

    def widen_tensor(x_BWF: Any) -> Any:
        import torch

        return (x_BWF.view(torch.int16).to(torch.int32) << 16).view(torch.float32)  # torch hardly knows unsigned types

    return Narrowing(narrow, lambda x_BWF: (x_BWF.astype(np.uint32) << 16).view(np.float32), widen_tensor)


def as_int8(rows: RowsOnDisk) -> Narrowing:
    """Divide each feature by its largest magnitude over 127; a feature that is always zero keeps the scale 1.

    The scales come from the rows of the file, each counted once, and not from windows, which overlap.
    """
    import numpy as np

    largest_F = np.zeros(rows.shape[1:], np.float32)
    for _, piece in rows_on_disk.in_pieces(rows):
        np.maximum(largest_F, np.abs(piece).max(axis=0), out=largest_F)
    scale_F = np.where(largest_F > 0, largest_F / 127, 1).astype(np.float32)

    def narrow(rows_CF: Any, out: Any) -> None:
        out[:] = np.rint(rows_CF / scale_F)

    def widen_tensor(x_BWF: Any) -> Any:
        import torch

        return x_BWF * torch.as_tensor(scale_F, device=x_BWF.device)

    return Narrowing(narrow, lambda x_BWF: x_BWF * scale_F, widen_tensor)


def on_any(dtype: str, fit: Callable[[RowsOnDisk], Narrowing], parts: Parts) -> Parts:
    """Store the floating rows of each file as `dtype`."""
    inner_rows, inner_transfer = parts.rows, parts.transfer
    newest: list[Narrowing] = []

    def rows(parts: Parts, path: Path) -> Any:
        import numpy as np

        stored = RowsOnDisk(path)
        if stored.dtype.kind != "f":
            return inner_rows(parts, path)
        newest[:] = [fit(stored)]
        narrow_rows = np.empty(stored.shape, dtype)
        for first, piece in rows_on_disk.in_pieces(stored):
            newest[-1].narrow(piece, narrow_rows[first : first + len(piece)])
        return narrow_rows

    def transfer(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
        widen = newest[-1].widen_tensor if hasattr(x, "cpu") else newest[-1].widen
        return inner_transfer(parts, widen(x), y)

    return replace(parts, rows=rows, transfer=transfer)


def holds(share: float, extent: Extent) -> Holding:
    """Count the narrow rows, the labels, and the narrow batch beside the wide one."""
    narrow = int(extent.rows * extent.input_bytes * share)
    return Holding(
        source=narrow + extent.rows * extent.target_bytes,
        batches=int(extent.batch_bytes * share),
        input_bytes=int(extent.input_bytes * share),
    )


def strategy(name: str, dtype: str, fit: Any, precision: str, share: float, about: str) -> Strategy:
    apply = partial(on_any, dtype, fit)
    return Strategy(
        name,
        rewrites=("rows", "transfer"),
        on={"torch": apply, "jax": apply},
        about=f"{about}\n\n{__doc__}",
        precision=precision,
        feeds="rounded",
        data="frames",
        holds=partial(holds, share),
        conflicts={
            **dict.fromkeys(
                ("mapped", "pread", "reservoir", "streaming"),
                "it makes frames narrow when they are read into memory, and that leaves them in their file",
            ),
            **dict.fromkeys(
                ("before automatic", "before prefetch_shared"), "that reads the frames in its own way: name it after"
            ),
        },
    )


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        strategy(
            "float16_rows",
            "float16",
            as_float16,
            "float16",
            0.5,
            "Keep frames in float16 and widen each batch; pay with 11 bits of precision and a range of ±65504.",
        ),
        strategy(
            "bfloat16_rows",
            "uint16",
            as_bfloat16,
            "bfloat16",
            0.5,
            "Keep frames in bfloat16 and widen each batch; pay with 8 bits of precision.",
        ),
        strategy(
            "int8_rows",
            "int8",
            as_int8,
            "int8",
            0.25,
            "Keep frames in 8 bits with one scale per feature and widen each batch; pay with steps of 1/127.",
        ),
    ]
