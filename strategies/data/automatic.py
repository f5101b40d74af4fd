"""Read or map the rows, by their size and the available memory; pay nothing but the choice.

Batches are gathered from the rows (`strided_view`). The rows are read where they take at most half of the available
memory, and mapped where they take more (`mapped`). Windows are never copied up front: copies take `window / stride`
times the rows, for a wait that was no shorter in torch and about two thirds as long in JAX. `available_gib` sets the
available memory; 0 stands for that of this machine. The choice and its reason are noted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.rows import mapped
from strategies.data.windows import strided_view

GIB = 1 << 30
ROWS_SHARE = 0.5


class Choice(NamedTuple):
    """Whether the rows are mapped, and the reason."""

    mapped: bool
    reason: str


def available_bytes(available_gib: float) -> int:
    """Return the memory that the knob sets, or what this machine has available."""
    import psutil

    return int(available_gib * GIB) or psutil.virtual_memory().available


def choose(rows_bytes: int, eager_bytes: int, available: int) -> Choice:
    """Choose by the bytes of the rows, of all windows as copies, and of the memory available."""
    mapped = rows_bytes > ROWS_SHARE * available
    place = "mapped rows" if mapped else "rows in memory"
    reason = f"{place}, from which batches are gathered: they take {_mib(rows_bytes)} of {_mib(available)} available"
    return Choice(mapped, f"{reason} (copies of all windows {_mib(eager_bytes)})")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def on_any(parts: Parts, available_gib: float = 0.0) -> Parts:
    available = available_bytes(available_gib)
    plain = parts

    def rows(parts: Parts, path: Path) -> Any:
        large = choose(Path(path).stat().st_size, 0, available).mapped
        return (mapped.on_any(plain) if large else plain).rows(parts, path)

    def windows(parts: Parts, source: Source) -> Windows:
        rows_bytes = source.inputs.nbytes + (source.targets.nbytes if source.joined is None else 0)
        per_row = source.inputs[0].nbytes + source.targets[0].nbytes
        parts.notes["choice"] = choose(rows_bytes, source.count * source.window * per_row, available).reason
        return strided_view.on_any(plain).windows(parts, source)

    return replace(parts, rows=rows, windows=windows)


def holds(extent: Extent, available_gib: float = 0.0) -> Held:
    choice = choose(extent.base, 0, available_bytes(available_gib))
    return mapped.holds(extent) if choice.mapped else strided_view.holds(extent)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "automatic", rewrites=("rows", "windows"), on={"torch": on_any, "jax": on_any}, about=__doc__, holds=holds
        )
    ]
