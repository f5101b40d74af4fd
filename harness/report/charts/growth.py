"""Peak memory against the length of the context, each line named at its end."""

import textwrap
from collections.abc import Sequence
from typing import Any

from harness.records.case import CONTROL
from harness.report.charts.alike import LENGTH, known_lengths
from harness.report.charts.names import at_edge, height_of
from harness.report.charts.style import LINE_OF_TITLE, LINES, RED, WIDTH, altair, plain, tooltip
from harness.report.export import Figures

TOOLTIP = ("strategy:N", "tokens:Q", "peak_mib:Q", "predicted_mib:Q", "answer:N", "verdict:N", "status:N")


def lengths(rows: Sequence[Figures], sizes: str = "") -> Any:
    """Draw peaks over lengths, both as logarithms; predictions hollow, the budget a line. None for one length.

    Rows differ in their length alone; `sizes` tell them from others of their place in the title.
    """
    rows = [row for row in rows if row["shape"].get(LENGTH) and row["strategy"] != CONTROL]
    if len(known_lengths(rows)) < 2:
        return None
    sized = [plain(row) | {LENGTH: row["shape"][LENGTH]} for row in rows]
    measured = [row for row in sized if row["status"] == "ok" and row["peak_mib"]]
    predicted = [row for row in sized if row["predicted_mib"]]
    alt = altair()
    budgets = sorted({row["budget_mib"] for row in sized if row["budget_mib"]})
    peaks = [*(row["peak_mib"] for row in measured), *(row["predicted_mib"] for row in predicted), *budgets]
    domain = [min(peaks) * 0.85, max(peaks) * 1.15]
    names = list(dict.fromkeys(row["strategy"] for row in sized))
    colors = alt.Scale(domain=names, range=[LINES[at % len(LINES)] for at in range(len(names))])
    color = alt.Color("strategy:N", sort=None, legend=None, scale=colors)
    axis = alt.Axis(values=sorted({row[LENGTH] for row in sized}), format=",d")
    x = alt.X(
        f"{LENGTH}:Q",
        title="tokens (logarithmic)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=axis,
    )
    y = alt.Scale(type="log", nice=False, domain=domain)
    lines = alt.Chart(alt.Data(values=measured)).mark_line(point=alt.OverlayMarkDef(filled=True, size=50))
    hollow = alt.Chart(alt.Data(values=predicted)).mark_point(filled=False, size=110)
    layers = [
        lines.encode(
            x=x, y=alt.Y("peak_mib:Q", title="peak MiB (logarithmic)", scale=y), color=color, tooltip=tooltip(*TOOLTIP)
        ),
        hollow.encode(x=x, y=alt.Y("predicted_mib:Q", scale=y), color=color, tooltip=tooltip(*TOOLTIP)),
        *(alt.Chart().mark_rule(strokeDash=[6, 4], color=RED).encode(y=alt.YDatum(budget)) for budget in budgets),
    ]
    height = height_of(len(names))
    ends = {name: _end([row for row in sized if row["strategy"] == name]) for name in names}
    values = _named([end for end in ends.values() if end is not None], domain, height)
    text = alt.Chart(alt.Data(values=values)).mark_text(align="left", dx=14, fontSize=11, clip=False)
    layers.append(text.encode(x=x, y=alt.Y("place:Q", scale=y), text=alt.Text("label:N"), color=color))
    words = f"{rows[0]['suite']} on {rows[0]['place']}" + (f", {sizes}" if sizes else "")
    title = textwrap.wrap(words, LINE_OF_TITLE)
    return alt.layer(*layers).properties(width=WIDTH - 120, height=height, title=title)


def _named(ends: Sequence[Figures], domain: Sequence[float], height: int) -> list[Figures]:
    """Return where each name stands: right of the last length, beside its line's end and apart from the others."""
    places = at_edge([end["end"] for end in ends], domain, height)
    last = max((end[LENGTH] for end in ends), default=0)
    return [
        {"strategy": end["strategy"], "label": end["label"], LENGTH: last, "place": place}
        for end, place in zip(ends, places, strict=True)
    ]


def _end(rows: Sequence[Figures]) -> Figures | None:
    """Return the longest row of a strategy whose peak is known or predicted, with that peak as its end."""
    for row in sorted(rows, key=lambda row: -row[LENGTH]):
        peak = row["peak_mib"] if row["status"] == "ok" and row["peak_mib"] else row["predicted_mib"]
        if peak:
            return row | {"end": peak}
    return None
