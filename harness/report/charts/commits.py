"""A row over commits: its peak, run by run, and where it stepped."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report import words
from harness.report.charts.style import BLUE, HEIGHT, MIB, RED, WIDTH, altair, short
from harness.report.words import Key, titles
from harness.verbs.history import Series


def commits(series: Sequence[Series], title: str) -> Any:
    """Draw the peaks of rows over their runs, steps in red; None where no row is in more than one run.

    Runs are numbered over all rows, so that one that joined later begins at its own first run. Rows of several
    comparisons are named with what tells these apart.
    """
    runs = sorted({(point.utc, point.commit) for each in series for point in each.points})
    digits = len(str(len(runs)))
    name_of = {run: f"{at:0{digits}d} {words.short(run[1])}" for at, run in enumerate(runs, start=1)}
    telling = _telling(titles({(each.case.comparison_key, each.machine): each.case for each in series}))
    values = [
        {
            "id": number,
            "row": _name(each, telling),
            "run": name_of[point.utc, point.commit],
            "mib": point.peak_bytes / MIB,
            "step": any(step.after is point and step.figure == "peak" for step in each.steps),
        }
        for number, each in enumerate(series)
        if len(each.points) > 1
        for point in each.points
        if point.peak_bytes
    ]
    if not values:
        return None
    alt = altair()
    x = alt.X("run:N", title="run, by commit", axis=alt.Axis(labelAngle=-40))
    y = alt.Y("mib:Q", title="peak MiB", scale=alt.Scale(type="log", nice=False, padding=12))
    data = alt.Data(values=values)
    lines = alt.Chart(data).mark_line(color=BLUE, opacity=0.7).encode(x=x, y=y, detail="id:N")
    color = alt.condition("datum.step", alt.value(RED), alt.value(BLUE))
    points = (
        alt.Chart(data)
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=x, y=y, color=color, tooltip=["row:N", "mib:Q"])
    )
    last = {value["id"]: value for value in values}
    names = alt.Chart(alt.Data(values=list(last.values())))
    text = names.mark_text(align="left", dx=8, fontSize=10).encode(x=x, y=y, text="row:N")
    return alt.layer(lines, points, text).properties(width=WIDTH - 120, height=HEIGHT, title=title)


def _telling(title_of: Mapping[Key, str]) -> dict[Key, str]:
    """Return the words of each title that are not in all of them."""
    parts = {key: title.split(", ") for key, title in title_of.items()}
    shared = set.intersection(*map(set, parts.values())) if parts else set()
    return {key: ", ".join(part for part in each if part not in shared) for key, each in parts.items()}


def _name(series: Series, telling: Mapping[Key, str]) -> str:
    title = telling[series.case.comparison_key, series.machine]
    return f"{short(series.case.label)}: {title}" if title else short(series.case.label)
