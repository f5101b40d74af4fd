"""The pictures of a report, each defined once: as SVG, as PNG, and within a page.

They are altair charts made of the flat figures of rows (`harness.report.export`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.report.charts.growth import lengths
from harness.report.charts.pareto import front, tradeoff
from harness.report.charts.phases import phases
from harness.report.charts.ranks import ranks
from harness.report.charts.style import SETTINGS, PicturesError, altair
from harness.report.charts.waterfall import contributions
from harness.report.export import Figures

COMPARED: dict[str, Callable[[Sequence[Figures]], Any]] = {
    "tradeoff": tradeoff,
    "phases": phases,
    "contributions": contributions,
    "ranks": ranks,
}
"""Charts of one comparison."""

__all__ = [
    "PicturesError",
    "altair",
    "contributions",
    "drawings",
    "front",
    "lengths",
    "of_rows",
    "phases",
    "ranks",
    "save",
    "tradeoff",
]


def drawings(rows: Sequence[Figures]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each chart that rows of one suite may have, and what draws it, or returns None."""
    for place in dict.fromkeys(row["place"] for row in rows):
        members = [row for row in rows if row["place"] == place]
        yield f"lengths-{place.replace('/', '-')}", partial(lengths, members)
    by_comparison: dict[str, list[Figures]] = {}
    for row in rows:
        by_comparison.setdefault(row["comparison"], []).append(row)
    for number, members in enumerate(by_comparison.values(), 1):
        for name, draw in COMPARED.items():
            yield f"{name}-{number}", partial(draw, members)


def of_rows(rows: Sequence[Figures]) -> dict[str, Any]:
    """Draw every chart that rows of one suite have figures for; a name for each."""
    return {name: chart for name, draw in drawings(rows) if (chart := draw()) is not None}


def save(charts: dict[str, Any], folder: Path, prefix: str) -> Iterator[Path]:
    """Write each chart as SVG and PNG; yield the paths. Raises PicturesError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, chart in charts.items():
            for kind, options in (("svg", {}), ("png", {"scale_factor": 2})):
                path = folder / f"{prefix}-{name}.{kind}"
                chart.configure(**SETTINGS).save(path, **options)
                yield path
    except OSError as error:
        raise PicturesError(f"pictures cannot be written to '{folder}' ({error.strerror}): name another") from None
