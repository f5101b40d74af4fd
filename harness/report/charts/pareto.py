"""Memory against time: the front that nothing beats in both, all other rows in grey."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from harness.records.case import CONTROL
from harness.records.record import WRONG
from harness.report.charts.beside import Box, beside
from harness.report.charts.style import BLUE, GREY, HEIGHT, WIDTH, altair, logarithmic, plain, titled, tooltip
from harness.report.export import Figures

TOOLTIP = ("strategy:N", "peak_mib:Q", "peak_ratio:Q", "time_ratio:Q", "answer:N", "verdict:N")
TIMES = ("time_ratio", "time_ratio_low", "time_ratio_high")
EXACTLY, BY_ANY = "best, answers as before", "best, answers less exactly"
BEATEN = "beaten in both, as estimated"
KINDS = {EXACTLY: BLUE, BY_ANY: "#d9822b", BEATEN: GREY}
"""Which points are which, and their colours."""
MARK, STROKE = 11.0, 2.0
"""How wide points and lines are, in pixels."""


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
        .mark_line(interpolate="step-after", color=KINDS[kind], strokeDash=[4, 3])
        .encode(x=x, y=y)
        for kind, best in reversed(fronts.items())  # where both are one, that of the answers as before is seen
    ]
    known = [row for row in measured if row["time_ratio_low"] is not None]
    intervals = alt.Chart(alt.Data(values=known)).mark_rule(opacity=0.45)
    layers.append(intervals.encode(x=alt.X("time_ratio_low:Q"), x2=alt.X2("time_ratio_high:Q"), y=y, color=color))
    for exact in (True, False):
        members = [row for row in measured if row["exact"] is exact]
        points = alt.Chart(alt.Data(values=members)).mark_point(filled=exact, size=75, opacity=1, strokeWidth=2)
        layers.append(points.encode(x=x, y=y, color=color, tooltip=tooltip(*TOOLTIP)))
    named = [row for row in measured if row["kind"] != BEATEN or row["strategy"] == "baseline"]
    boxes = [*_marks(measured, across, up), *(box for best in fronts.values() for box in _steps(best, across, up))]
    return titled(alt.layer(*layers, *_labels(alt, named, boxes, across, up)), rows)


def _marks(rows: Sequence[Figures], across: Sequence[float], up: Sequence[float]) -> list[Box]:
    """Return what the points cover, and the intervals of their times."""
    boxes = []
    for row in rows:
        x, y = _pixels(row, across, up)
        boxes.append(Box(x - MARK / 2, x + MARK / 2, y - MARK / 2, y + MARK / 2))
        if row["time_ratio_low"] is not None:
            low, high = (WIDTH * _share(row[name], across) for name in TIMES[1:])
            boxes.append(Box(low, high, y - STROKE / 2, y + STROKE / 2))
    return boxes


def _steps(best: Sequence[Figures], across: Sequence[float], up: Sequence[float]) -> list[Box]:
    """Return what the line of a front covers: from each point across to the time of the next, and then up to it."""
    boxes = []
    for one, other in pairwise(sorted(best, key=lambda row: float(row["time_ratio"]))):
        (x, y), (to_x, to_y) = _pixels(one, across, up), _pixels(other, across, up)
        boxes.append(Box(x, to_x, y - STROKE / 2, y + STROKE / 2))
        boxes.append(Box(to_x - STROKE / 2, to_x + STROKE / 2, min(y, to_y), max(y, to_y)))
    return boxes


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


def _labels(
    alt: Any, rows: Sequence[Figures], boxes: Sequence[Box], across: Sequence[float], up: Sequence[float]
) -> list[Any]:
    """Write each name beside its point, where it covers least of the others and of `boxes`."""
    rows = sorted(rows, key=lambda row: float(row["peak_ratio"]))
    layers: dict[str, list[Figures]] = {"left": [], "right": []}
    points = [(*_pixels(row, across, up), str(row["label"])) for row in rows]
    for row, name in zip(rows, beside(points, boxes), strict=True):
        x = _value((name.box.left if name.align == "left" else name.box.right) / WIDTH, across)
        y = _value((name.box.low + name.box.high) / 2 / HEIGHT, up)
        layers[name.align].append(row | {"align": name.align, "name_x": x, "name_y": y})
    return [
        alt.Chart(alt.Data(values=named))
        .mark_text(align=align, baseline="middle", fontSize=11)
        .encode(x=alt.X("name_x:Q"), y=alt.Y("name_y:Q"), text=alt.Text("label:N"))
        for align, named in layers.items()
        if named
    ]


def _pixels(row: Figures, across: Sequence[float], up: Sequence[float]) -> tuple[float, float]:
    """Return where a point lies, in pixels from the lower left corner."""
    return WIDTH * _share(row["time_ratio"], across), HEIGHT * _share(row["peak_ratio"], up)


def _share(value: float, ends: Sequence[float]) -> float:
    """Return where a value lies between two ends of a logarithmic axis, from 0 to 1."""
    return math.log(value / ends[0]) / math.log(ends[1] / ends[0])


def _value(share: float, ends: Sequence[float]) -> float:
    """Return the value at a share of a logarithmic axis."""
    return ends[0] * (ends[1] / ends[0]) ** share
