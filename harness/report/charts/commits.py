"""A row over commits: its peak, run by run, and where it stepped."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report import words
from harness.report.charts.names import at_edge, height_of
from harness.report.charts.style import GREY, LINES, MIB, RED, WIDTH, altair, short, tooltip
from harness.report.export import Figures
from harness.report.words import Key, titles
from harness.verbs.history import Series

COLORS = [color for color in LINES if color != RED]
"""Colours of rows; red are steps."""


def commits(series: Sequence[Series], title: str) -> Any:
    """Draw the peaks of rows over their runs, steps in red; None where no row is in more than one run.

    Runs are numbered over all rows, so that one that joined later begins at its own first run. Rows are named at the
    right edge; those of several comparisons with what tells these apart.
    """
    runs = sorted({(point.utc, point.commit) for each in series for point in each.points})
    digits = len(str(len(runs)))
    name_of = {run: f"{at:0{digits}d} {words.short(run[1])}" for at, run in enumerate(runs, start=1)}
    shown = [each for each in series if len(each.points) > 1 and any(point.peak_bytes for point in each.points)]
    if not shown:
        return None
    telling = _telling(titles({(each.case.comparison_key, each.machine): each.case for each in shown}))
    names = [_name(each, telling) for each in shown]
    values = [value for number, each in enumerate(shown) for value in _points(number, names[number], each, name_of)]
    peaks = [value["mib"] for value in values]
    domain = [min(peaks) * 0.95, max(peaks) * 1.05]
    height = height_of(len(shown))
    alt = altair()
    x = alt.X("run:N", title="run, by commit", axis=alt.Axis(labelAngle=-40))
    scale = alt.Scale(type="log", nice=False, domain=domain)
    y = alt.Y("mib:Q", title="peak MiB", scale=scale)
    colors = alt.Scale(domain=list(range(len(shown))), range=[COLORS[at % len(COLORS)] for at in range(len(shown))])
    color = alt.Color("id:N", legend=None, scale=colors)
    data = alt.Data(values=values)
    lines = alt.Chart(data).mark_line(opacity=0.7).encode(x=x, y=y, detail=alt.Detail("id:N"), color=color)
    stepped = alt.condition("datum.step", alt.value(RED), color)
    points = (
        alt.Chart(data)
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=x, y=y, color=stepped, tooltip=tooltip("row:N", "mib:Q"))
    )
    ends = alt.Chart(alt.Data(values=_named(values, domain, height)))
    place = alt.Y("place:Q", scale=scale)
    text = ends.mark_text(align="left", dx=6, fontSize=10, clip=False).encode(
        x=alt.XValue("width"), y=place, text=alt.Text("row:N"), color=color
    )
    leaders = ends.mark_rule(color=GREY, opacity=0.5, strokeWidth=0.7).encode(
        x=x, x2=alt.X2Value("width"), y=y, y2=alt.Y2("place:Q")
    )
    return alt.layer(lines, points, text, leaders).properties(width=WIDTH - 120, height=height, title=title)


def _points(number: int, name: str, series: Series, name_of: Mapping[tuple[str, str], str]) -> list[Figures]:
    """Return the peaks of a row, each with its run and whether it is a step."""
    stepped = {id(step.after) for step in series.steps if step.figure == "peak"}
    return [
        {
            "id": number,
            "row": name,
            "run": name_of[point.utc, point.commit],
            "mib": point.peak_bytes / MIB,
            "step": id(point) in stepped,
        }
        for point in series.points
        if point.peak_bytes
    ]


def _named(values: Sequence[Figures], domain: Sequence[float], height: int) -> list[Figures]:
    """Return the last point of each row, with the `place` of its name: near it, and apart from the others."""
    ends = list({value["id"]: value for value in values}.values())
    places = at_edge([end["mib"] for end in ends], domain, height)
    return [end | {"place": place} for end, place in zip(ends, places, strict=True)]


def _telling(title_of: Mapping[Key, str]) -> dict[Key, str]:
    """Return the words of each title that are not in all of them."""
    parts = {key: title.split(", ") for key, title in title_of.items()}
    shared = set.intersection(*map(set, parts.values())) if parts else set()
    return {key: ", ".join(part for part in each if part not in shared) for key, each in parts.items()}


def _name(series: Series, telling: Mapping[Key, str]) -> str:
    title = telling[series.case.comparison_key, series.machine]
    return f"{short(series.case.label)}: {title}" if title else short(series.case.label)
