"""The pictures of a report, each defined once: as SVG, as PNG, and within a page.

They are altair charts made of the flat figures of rows (`harness.report.export`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.report.charts.alike import by_length
from harness.report.charts.growth import lengths
from harness.report.charts.pareto import comparable, front, tradeoff
from harness.report.charts.phases import composed, phases
from harness.report.charts.ranks import divided, ranks
from harness.report.charts.style import SETTINGS, PicturesError, altair
from harness.report.charts.waterfall import contributions, stepwise
from harness.report.export import Figures

OfRows = Callable[[Sequence[Figures]], Any]
COMPARED: dict[str, tuple[OfRows, OfRows]] = {
    "tradeoff": (comparable, tradeoff),
    "phases": (composed, phases),
    "contributions": (stepwise, contributions),
    "ranks": (divided, ranks),
}
"""Charts of one comparison: what it needs figures of, which is quick, and what draws it."""

__all__ = [
    "PicturesError",
    "altair",
    "contributions",
    "drawings",
    "front",
    "lengths",
    "phases",
    "ranks",
    "save",
    "spec",
    "tradeoff",
]


def drawings(rows: Sequence[Figures]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each chart that rows of one suite have figures for, and what draws it."""
    for place in dict.fromkeys(row["place"] for row in rows):
        members = [row for row in rows if row["place"] == place]
        for number, (sizes, alike) in enumerate(by_length(members), 1):
            others = f"-{number}" if number > 1 else ""
            yield f"lengths-{place.replace('/', '-')}{others}", partial(lengths, alike, sizes)
    by_comparison: dict[str, list[Figures]] = {}
    for row in rows:
        by_comparison.setdefault(row["comparison"], []).append(row)
    for number, members in enumerate(by_comparison.values(), 1):
        for name, (needed, draw) in COMPARED.items():
            if needed(members):
                yield f"{name}-{number}", partial(draw, members)


def spec(draw: Callable[[], Any]) -> dict[str, Any]:
    """Draw a chart for a page. Altair does not check it, which would take as long again: tests and `save` do."""
    with altair().utils.schemapi.debug_mode(False):
        return dict(draw().to_dict(validate=False))


def save(charts: dict[str, Any], folder: Path, prefix: str) -> Iterator[Path]:
    """Write each chart as SVG and PNG; yield the paths, all in the folder whatever the prefix has.

    Raises PicturesError where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, chart in charts.items():
            for kind, options in (("svg", {}), ("png", {"scale_factor": 2})):
                path = folder / re.sub(r"[/\0]", "-", f"{prefix}-{name}.{kind}")
                chart.configure(**SETTINGS).save(path, **options)
                yield path
    except OSError as error:
        raise PicturesError(f"pictures cannot be written to '{folder}' ({error.strerror}): name another") from None
