"""What each rank of a run holds, beside the same run in one process."""

from collections.abc import Sequence
from typing import Any

from harness.report.charts.style import BLUE, MIB, RED, altair, titled, tooltip
from harness.report.export import Figures

BAR = 24


def ranks(rows: Sequence[Figures]) -> Any:
    """Draw the peak of every rank as a point and the largest as a bar; None where no row has several ranks."""
    several, baseline = divided(rows), _baseline(rows)
    if not several or baseline is None:
        return None
    alt = altair()
    y = alt.Y("strategy:N", sort=[row["strategy"] for row in several], title=None)
    largest = [{"strategy": row["strategy"], "mib": row["peak_bytes"] / MIB} for row in several]
    each = [
        {"strategy": row["strategy"], "mib": peak / MIB, "rank": number}
        for row in several
        for number, peak in enumerate(row["rank_peaks"])
    ]
    x = alt.X("mib:Q", title="peak MiB, a dot for each rank; the line is one process", scale=alt.Scale(zero=True))
    bars = alt.Chart(alt.Data(values=largest)).mark_bar(height=BAR - 8, color=BLUE, opacity=0.35)
    points = alt.Chart(alt.Data(values=each)).mark_point(filled=True, color=BLUE, size=45, opacity=1)
    one = alt.Chart().mark_rule(color=RED, strokeDash=[6, 4]).encode(x=alt.XDatum(baseline["peak_bytes"] / MIB))
    layers = [bars.encode(y=y, x=x), points.encode(y=y, x=x, tooltip=tooltip("strategy:N", "rank:Q", "mib:Q")), one]
    return titled(alt.layer(*layers), rows, height=alt.Step(BAR))


def divided(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows of several ranks; none without the baseline, which has one."""
    known = [row for row in rows if row["status"] == "ok" and row["peak_bytes"] and row["ranks"] > 1]
    return known if _baseline(rows) is not None else []


def _baseline(rows: Sequence[Figures]) -> Figures | None:
    return next((row for row in rows if row["strategy"] == "baseline" and row["peak_bytes"]), None)
