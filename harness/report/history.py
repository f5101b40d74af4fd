"""Rows over commits as text: what stepped, and every point of the rows that did."""

import math
from collections.abc import Sequence

from tabulate import tabulate

from harness.report.text import code, escaped, row_name
from harness.report.words import mib, short, titles
from harness.verbs.history import Point, Series, Step

HEADERS = ("row", "figure", "before", "after", "change", "commits")
POINTS = ("commit", "when", "peak MiB", "time", "status")


def text(series: Sequence[Series], everything: bool = False) -> str:
    """Write the steps of all rows, the worst first, and the points of rows that stepped, or of `everything`."""
    stepped = [(each, step) for each in series for step in each.steps]
    stepped.sort(key=lambda pair: _rank(pair[1]))
    worse = sum(step.worse for _, step in stepped)
    several = sum(len(each.points) > 1 for each in series)
    counts = f"{worse} jump{'' if worse == 1 else 's'} for the worse, {len(stepped) - worse} for the better"
    title_of = titles({(each.case.comparison_key, each.machine): each.case for each in series})
    pieces = [f"{len(series)} rows, {several} of them in more than one run: {counts}."]
    if stepped:
        rows = [_step(each, step, title_of[each.case.comparison_key, each.machine]) for each, step in stepped]
        pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", disable_numparse=True))
    for each in series:
        if each.steps or everything:
            title = title_of[each.case.comparison_key, each.machine]
            pieces.append(f"#### {escaped(each.suite)}: {escaped(title)}: {row_name(each.case.label)}")
            pieces.append(tabulate(map(_point, each.points), POINTS, tablefmt="pipe", disable_numparse=True))
    return "\n\n".join(pieces) + "\n"


def _rank(step: Step) -> tuple[bool, float]:
    """Return where a step stands: those to worse first, and of these what runs no longer."""
    return not step.worse, -(step.ratio or (math.inf if step.worse else 0.0))


def _step(series: Series, step: Step, title: str) -> tuple[str, ...]:
    before, after = (_figure(step, point) for point in (step.before, step.after))
    change = "" if step.ratio is None else f"{step.ratio:.2f} x"
    where = f"{code(short(step.before.commit))} to {code(short(step.after.commit))}"
    row = f"{row_name(series.case.label)} of {escaped(series.suite)}: {escaped(title)}"
    return row, step.figure, before, after, change, where


def _figure(step: Step, point: Point) -> str:
    if step.figure == "peak":
        return f"{mib(point.peak_bytes)} MiB"
    return _time(point) if step.figure == "time" else point.status


def _time(point: Point) -> str:
    return "" if point.speed is None else f"{point.speed.ratio:.2f} x"


def _point(point: Point) -> tuple[str, ...]:
    return (
        code(short(point.commit)),
        point.utc[:16].replace("T", " "),
        mib(point.peak_bytes),
        _time(point),
        point.status,
    )
