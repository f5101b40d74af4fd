"""Read or map the rows, and gather or copy the windows, by what there is of memory; pay nothing but the choice.

The rows are read where they take at most half of the available memory, and mapped where they take more (`mapped`).
With `eager` "auto" every window is copied up front (`numpy_copy`) where rows and copies take at most half of it, and
gathered when its batch is asked for (`strided_view`) where they take more; "always" and "never" leave no choice, and
mapped rows are never copied by choice. `available_gib` sets the available memory; 0 stands for that of this machine. Of
several processes, as ranks of torch are, each counts on an equal share of it. The choice and its reason are noted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import Extent, Holding, Parts, Source, Strategy, Windows, available_bytes, hookimpl, knobs
from strategies.data.rows import mapped
from strategies.data.windows import numpy_copy, strided_view

SHARE = 0.5
EAGER = ("auto", "always", "never")


class Choice(NamedTuple):
    """Whether the rows are mapped, whether all windows are copied, and the reason."""

    mapped: bool
    eager: bool
    reason: str


def choose(rows_bytes: int, copies_bytes: int, available: int, eager: str = "auto") -> Choice:
    """Choose by the bytes of the rows, of all windows as copies, and of the memory available."""
    on_disk = rows_bytes > SHARE * available
    fits = not on_disk and rows_bytes + copies_bytes <= SHARE * available
    copied = fits if eager == "auto" else eager == "always"
    rows = "mapped rows" if on_disk else "rows in memory"
    windows = "of which every window is copied" if copied else "from which batches are gathered"
    setting = "" if eager == "auto" else f" (eager: {eager})"
    sizes = f"rows take {_mib(rows_bytes)} and copies {_mib(copies_bytes)} of {_mib(available)} available"
    return Choice(on_disk, copied, f"{rows}, {windows}{setting}: {sizes}")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def checked(eager: str) -> None:
    """Raise ValueError for a word that says nothing."""
    if eager not in EAGER:
        raise ValueError(f"automatic: eager is one of {', '.join(EAGER)}, not '{eager}'")


def on_any(parts: Parts, available_gib: float = 0.0, eager: str = "auto") -> Parts:
    knobs.at_least_0("automatic", available_gib=available_gib)
    checked(eager)
    processes = parts.ranks if parts.place.backend == "torch" else 1  # in JAX ranks are devices of one
    available = available_bytes(available_gib) // processes
    plain = parts

    def rows(parts: Parts, path: Path) -> Any:
        large = choose(Path(path).stat().st_size, 0, available).mapped
        return (mapped.on_any(plain) if large else plain).rows(parts, path)

    def windows(parts: Parts, source: Source) -> Windows:
        rows_bytes = source.inputs.nbytes + (source.targets.nbytes if source.joined is None else 0)
        choice = choose(rows_bytes, _copies(source), available, eager)
        parts.notes["choice"] = choice.reason
        way = numpy_copy if choice.eager else strided_view
        return way.on_any(plain).windows(parts, source)

    return replace(parts, rows=rows, windows=windows)


def _copies(source: Source) -> int:
    """Count the bytes of all windows as copies: integers take 4 bytes each."""
    rows = (source.inputs[0], source.targets[0])
    sizes = (4 * row.size if row.dtype.kind in "iu" else row.nbytes for row in rows)
    return source.count * source.window * sum(sizes)


def holds(extent: Extent, available_gib: float = 0.0, eager: str = "auto") -> Holding:
    copies = numpy_copy.holds(extent)
    choice = choose(extent.base, copies.windows, available_bytes(available_gib) // extent.processes, eager)
    windows = copies.windows if choice.eager else 0
    of_rows = mapped.holds(extent) if choice.mapped else Holding()
    return replace(of_rows, windows=of_rows.windows + windows)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("automatic", rewrites=("rows", "windows"), on=on, about=__doc__, holds=holds)]
