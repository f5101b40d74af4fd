"""Memory against time: the front that nothing beats in both, all other rows in grey."""

import math
from collections.abc import Sequence
from typing import Any

from harness.records.case import CONTROL
from harness.records.record import WRONG
from harness.report.charts.style import BLUE, GREY, HEIGHT, WIDTH, altair, logarithmic, plain, titled
from harness.report.export import Figures

TOOLTIP = ["strategy:N", "peak_mib:Q", "peak_ratio:Q", "time_ratio:Q", "answer:N", "verdict:N"]
TIMES = ("time_ratio", "time_ratio_low", "time_ratio_high")
EXACTLY, BY_ANY = "best, answers as before", "best, answers less exactly"
BEATEN = "beaten in both, as estimated"
KINDS = {EXACTLY: BLUE, BY_ANY: "#d9822b", BEATEN: GREY}
"""Which points are which, and their colours."""
LETTER, LINE = 8 / WIDTH, 13 / HEIGHT
"""The width of a letter and the height of a line, as shares of the picture."""


def tradeoff(rows: Sequence[Figures]) -> Any:
    """Draw peaks against step times, as multiples of what rows are compared with; None for fewer than two points.

    There is a front of the rows that answer as the baseline does, and one of all rows.
    """
    measured = [_placed(row) for row in comparable(rows)]
    if not measured:
        return None
    alt = altair()
    fronts = {EXACTLY: front([row for row in measured if row["exact"]]), BY_ANY: front(measured)}
    for row in measured:
        row["kind"] = next((kind for kind, best in fronts.items() if row in best), BEATEN)
    across = _span([row[name] for row in measured for name in TIMES if row[name] is not None])
    up = _span([row["peak_ratio"] for row in measured])
    (x_scale, x_axis), (y_scale, y_axis) = logarithmic(*across), logarithmic(*up)
    x = alt.X(
        "time_ratio:Q", title="step time, x mean of baseline and control (logarithmic)", scale=x_scale, axis=x_axis
    )
    y = alt.Y("peak_ratio:Q", title="peak memory, x baseline (logarithmic)", scale=y_scale, axis=y_axis)
    scale = alt.Scale(domain=list(KINDS), range=list(KINDS.values()))
    color = alt.Color("kind:N", title=None, scale=scale, legend=alt.Legend(orient="top", symbolOpacity=1))
    layers = [
        alt.Chart(alt.Data(values=best))
        .mark_line(interpolate="step-after", color=KINDS[kind], strokeDash=[4, 3], opacity=0.8)
        .encode(x=x, y=y)
        for kind, best in fronts.items()
    ]
    known = [row for row in measured if row["time_ratio_low"] is not None]
    intervals = alt.Chart(alt.Data(values=known)).mark_rule(opacity=0.45)
    layers.append(intervals.encode(x=alt.X("time_ratio_low:Q"), x2="time_ratio_high:Q", y=y, color=color))
    for exact in (True, False):
        members = [row for row in measured if row["exact"] is exact]
        points = alt.Chart(alt.Data(values=members)).mark_point(filled=exact, size=75, opacity=1, strokeWidth=2)
        layers.append(points.encode(x=x, y=y, color=color, tooltip=TOOLTIP))
    named = [row for row in measured if row["kind"] != BEATEN or row["strategy"] == "baseline"]
    return titled(alt.layer(*layers, *_labels(alt, named, across, up)), rows)


def front(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows that no other beats in both peak and time, by growing peak."""
    best: list[Figures] = []
    for row in sorted(rows, key=lambda row: (row["peak_ratio"], row["time_ratio"])):
        if not best or row["time_ratio"] < best[-1]["time_ratio"]:
            best.append(row)
    return best


def comparable(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows whose figures may be held against each other; none where there are fewer than two."""
    points = [row for row in rows if _comparable(row)]
    return points if len(points) > 1 else []


def _comparable(row: Figures) -> bool:
    """Check whether both figures of a row, and its answer, may be held against those of others on this machine."""
    right = row["status"] == "ok" and row["answer"] not in WRONG and row["verdict"] != "withheld"
    here = row["strategy"] != CONTROL and not row["stand_in"]
    known = bool(row["answer"] and row["peak_ratio"] and row["time_ratio"])
    return right and here and (known or row["strategy"] == "baseline")


def _placed(row: Figures) -> Figures:
    """Return a row with its two ratios; the baseline, which stands for what others are compared with, is at 1."""
    return plain(row) | {"peak_ratio": row["peak_ratio"] or 1.0, "time_ratio": row["time_ratio"] or 1.0}


def _span(values: Sequence[float]) -> list[float]:
    """Return the ends of a logarithmic axis that has room around the values."""
    low, high = math.log(min(values)), math.log(max(values))
    room = max(0.12 * (high - low), 0.03)
    return [math.exp(low - room), math.exp(high + room)]


def _labels(alt: Any, rows: Sequence[Figures], across: Sequence[float], up: Sequence[float]) -> list[Any]:
    """Write each name beside its point, towards the middle of the picture, none over another."""
    layers = []
    placed = _beside(rows, across, up)
    for align, dx in (("left", 10), ("right", -10)):
        if side := [row for row in placed if row["align"] == align]:
            text = alt.Chart(alt.Data(values=side)).mark_text(align=align, dx=dx, dy=-8, fontSize=11)
            layers.append(text.encode(x="time_ratio:Q", y=alt.Y("at:Q"), text="label:N"))
    return layers


def _beside(rows: Sequence[Figures], across: Sequence[float], up: Sequence[float]) -> list[Figures]:
    """Return rows with the height `at` of their names: that of the point, or above the names that are in the way."""
    boxes: list[tuple[float, float, float]] = []
    placed = []
    for row in sorted(rows, key=lambda row: row["peak_ratio"]):
        x, y = _share(row["time_ratio"], across), _share(row["peak_ratio"], up)
        width = LETTER * len(row["label"])
        begin, end, align = (x, x + width, "left") if x <= 0.5 else (x - width, x, "right")
        for left, right, height in sorted(boxes, key=lambda box: box[2]):
            if left < end and begin < right and abs(height - y) < LINE:
                y = height + LINE
        boxes.append((begin, end, y))
        placed.append(row | {"align": align, "at": up[0] * (up[1] / up[0]) ** y})
    return placed


def _share(value: float, ends: Sequence[float]) -> float:
    """Return where a value lies between two ends of a logarithmic axis, from 0 to 1."""
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])
