"""Choose how to hold rows and windows by their size and the memory available; pay nothing but the choice.

Every window is copied up front (`numpy_copy`) where all of them take at most a quarter of the memory, each batch is
gathered from the rows (`strided_view`) where the rows take at most half of it, and else the file is mapped (`mapped`).
`available_gib` pretends an amount; with 0 the memory available on this machine counts. The choice and its reason are
noted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl

GIB = 1 << 30
EAGER_SHARE, ROWS_SHARE = 0.25, 0.5


class Choice(NamedTuple):
    """The strategy chosen, and why."""

    name: str
    why: str


def available_bytes(available_gib: float) -> int:
    """Give the pretended memory, or what this machine has available."""
    import psutil

    return int(available_gib * GIB) or psutil.virtual_memory().available


def choose(rows_bytes: int, eager_bytes: int, available: int) -> Choice:
    """Choose by the bytes of the rows, of all windows, and of the memory available."""
    told = f"rows of {_mib(rows_bytes)}, all windows {_mib(eager_bytes)}, {_mib(available)} available"
    if eager_bytes <= EAGER_SHARE * available:
        return Choice("numpy_copy", f"{told}: all windows take at most {EAGER_SHARE:.0%}")
    if rows_bytes <= ROWS_SHARE * available:
        return Choice("strided_view", f"{told}: all windows would take more than {EAGER_SHARE:.0%}")
    return Choice("mapped", f"{told}: the rows alone would take more than {ROWS_SHARE:.0%}")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def on_any(parts: Parts, available_gib: float = 0.0) -> Parts:
    from strategies import mapped, numpy_copy, strided_view

    available = available_bytes(available_gib)
    plain = parts

    def rows(parts: Parts, path: Path) -> Any:
        opens = mapped.on_any(plain) if Path(path).stat().st_size > ROWS_SHARE * available else plain
        return opens.rows(parts, path)

    def windows(parts: Parts, source: Source) -> Windows:
        rows_bytes = source.inputs.nbytes + (0 if _shared(source) else source.targets.nbytes)
        choice = choose(rows_bytes, source.count * source.window * _copied_bytes(source), available)
        parts.notes["automatic"] = f"chose {choice.name}: {choice.why}"
        makes = numpy_copy.on_any(plain) if choice.name == "numpy_copy" else strided_view.on_any(plain)
        return makes.windows(parts, source)

    return replace(parts, rows=rows, windows=windows)


def _copied_bytes(source: Source) -> int:
    """The bytes of one row, inputs and targets, as `numpy_copy` keeps it: 4 for an id or a label."""
    return sum(4 if rows.dtype.kind in "iu" else rows[0].nbytes for rows in (source.inputs, source.targets))


def _shared(source: Source) -> bool:
    import numpy as np

    return bool(np.may_share_memory(source.inputs, source.targets))


def holds(extent: Extent, available_gib: float = 0.0) -> Held:
    from strategies import mapped, numpy_copy, strided_view

    eager = extent.count * extent.window_bytes
    name = choose(extent.base, eager, available_bytes(available_gib)).name
    chosen = {"numpy_copy": numpy_copy.holds, "strided_view": strided_view.holds, "mapped": mapped.holds}
    return chosen[name](extent)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "automatic", rewrites=("rows", "windows"), on={"torch": on_any, "jax": on_any}, about=__doc__, holds=holds
        )
    ]
