"""What each strategy's peak is made of: a stacked bar of what the phases had added when it was reached."""

from collections.abc import Sequence
from typing import Any

from harness.records.case import CONTROL
from harness.report.charts.style import MIB, PARTS, altair, titled, tooltip
from harness.report.export import Figures

BAR = 22


def phases(rows: Sequence[Figures]) -> Any:
    """Draw a bar for each row, as long as its peak; None where no row says what its peak is made of."""
    shown = composed(rows)
    if not shown:
        return None
    alt = altair()
    values = [
        {"strategy": row["strategy"], "phase": phase, "mib": size / MIB, "at": at}
        for row in shown
        for at, (phase, size) in enumerate(row["composition"].items())
    ]
    known = list(dict.fromkeys(phase for phase in (*PARTS, *(value["phase"] for value in values))
                               if any(value["phase"] == phase for value in values)))  # fmt: skip
    colors = [PARTS.get(phase, "#b0b0b0") for phase in known]
    y = alt.Y("strategy:N", sort=[row["strategy"] for row in shown], title=None)
    bars = alt.Chart(alt.Data(values=values)).mark_bar(height=BAR - 8).encode(
        y=y,
        x=alt.X("mib:Q", title="MiB at the peak, by the phase that added them", stack="zero"),
        color=alt.Color("phase:N", title=None, sort=known, scale=alt.Scale(domain=known, range=colors),
                        legend=alt.Legend(orient="top")),
        order=alt.Order("at:Q"),
        tooltip=[*tooltip("strategy:N", "phase:N"), alt.Tooltip("mib:Q", format=",.1f")],
    )  # fmt: skip
    totals = [{"strategy": row["strategy"], "peak": row["peak_bytes"] / MIB,
               "text": f"{row['peak_bytes'] / MIB:,.0f}"} for row in shown]  # fmt: skip
    ends = alt.Chart(alt.Data(values=totals)).mark_text(align="left", dx=4, fontSize=10)
    return titled(
        alt.layer(bars, ends.encode(y=y, x=alt.X("peak:Q"), text=alt.Text("text:N"))), rows, height=alt.Step(BAR)
    )


def composed(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows that say what their peak is made of."""
    return [row for row in rows if row["status"] == "ok" and row["composition"] and row["strategy"] != CONTROL]
