"""The pictures of a report, each defined once: as SVG, as PNG, and within a page.

They are altair charts made of the flat figures of rows (`harness.report.export`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.records.case import CONTROL
from harness.records.record import OUT_OF_MEMORY
from harness.refusal import Refusal
from harness.report.export import Figures

MIB = 1 << 20
WIDTH, HEIGHT = 560, 320
PHASES = ("init", "forward", "loss", "backward", "update")
SIZE = "tokens"
VERDICTS = {
    "baseline": "#77777f", "wins": "#2a9753", "enables": "#2a9753", "saves": "#63b27c", "trades": "#d08f24",
    "same": "#9a9aa2", "costs": "#cf6049", "loses": "#cf6049", "fails": "#c03030", "withheld": "#9a9aa2",
    "saves, time open": "#63b27c", "same, time open": "#9a9aa2", "costs, time open": "#cf6049",
}  # fmt: skip


class PicturesError(Refusal):
    """Pictures that cannot be made, in one sentence."""


def of_rows(rows: Sequence[Figures]) -> dict[str, Any]:
    """Draw every chart that rows of one suite have figures for; a name for each."""
    drawn: dict[str, Any] = {}
    comparisons = list(dict.fromkeys(row["comparison"] for row in rows))
    for number, comparison in enumerate(comparisons):
        members = [row for row in rows if row["comparison"] == comparison]
        for name, draw in COMPARED.items():
            if (chart := draw(members)) is not None:
                drawn[f"{name}-{number + 1}"] = chart
    for place in dict.fromkeys(row["place"] for row in rows):
        if (chart := lengths([row for row in rows if row["place"] == place])) is not None:
            drawn[f"lengths-{place.replace('/', '-')}"] = chart
    return drawn


def save(charts: dict[str, Any], folder: Path, prefix: str) -> Iterator[Path]:
    """Write each chart as SVG and PNG; yield the paths. Raises PicturesError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, chart in charts.items():
            for kind, options in (("svg", {}), ("png", {"scale_factor": 2})):
                path = folder / f"{prefix}-{name}.{kind}"
                chart.save(path, **options)
                yield path
    except OSError as error:
        raise PicturesError(f"pictures cannot be written to '{folder}' ({error.strerror}): name another") from None


def altair() -> Any:
    """Import altair, or raise PicturesError."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise PicturesError(f"pictures need the package {error.name}: pip install '.[pictures]'") from None
    return altair


def tradeoff(rows: Sequence[Figures]) -> Any:
    """Draw memory against throughput: the front that nothing beats in both, and what exceeded its budget."""
    measured = [_plain(row) for row in rows if row["status"] == "ok" and row["peak_bytes"] and row["tokens_per_second"]]
    if len(measured) < 2:
        return None
    alt = altair()
    x = alt.X("peak_mib:Q", title="peak MiB", scale=alt.Scale(type="log", nice=False, padding=40))
    y = alt.Y("tokens_per_second:Q", title="tokens per second", scale=alt.Scale(zero=False, padding=20))
    all_ = alt.Chart(alt.Data(values=measured))
    beaten = alt.Chart(alt.Data(values=front(measured))).mark_line(
        interpolate="step-after", color="#999", strokeDash=[4, 3]
    )
    points = all_.mark_point(filled=True, size=70, opacity=1).encode(
        color=_verdicts(alt, measured), shape=alt.Shape("answer:N"), tooltip=TOOLTIP
    )
    layers = [beaten.encode(x=x, y=y), points.encode(x=x, y=y)]
    for (side, dy), members in _places(measured).items():
        dx = 8 if side == "left" else -8
        labels = alt.Chart(alt.Data(values=members)).mark_text(align=side, dx=dx, dy=dy, fontSize=10)
        layers.append(labels.encode(x=x, y=y, text="strategy:N"))
    failed = [_plain(row) for row in rows if row["status"] in OUT_OF_MEMORY and row["budget_bytes"]]
    if failed:
        crosses = alt.Chart(alt.Data(values=failed)).mark_text(text="✕", color="#c33", fontSize=14)
        lowest = min(row["tokens_per_second"] for row in measured)
        layers.append(crosses.encode(x=alt.X("budget_mib:Q"), y=alt.datum(lowest), tooltip=TOOLTIP))
    return _titled(alt.layer(*layers), rows)


def phases(rows: Sequence[Figures]) -> Any:
    """Draw the peak of each phase of a step, strategy by strategy: what sets the peak is the longest bar."""
    values = [
        {"strategy": row["strategy"], "phase": phase, "peak_mib": peak / MIB}
        for row in rows
        if row["status"] == "ok"
        for phase, peak in _of_steps(row["phases"]).items()
    ]
    if not values:
        return None
    alt = altair()
    order = list(dict.fromkeys(value["strategy"] for value in values))
    known = [phase for phase in PHASES if any(value["phase"] == phase for value in values)]
    bars = alt.Chart(alt.Data(values=values)).mark_bar()
    chart = bars.encode(
        y=alt.Y("strategy:N", sort=order, title=None, axis=alt.Axis(labelLimit=260)),
        yOffset=alt.YOffset("phase:N", sort=known),
        x=alt.X("peak_mib:Q", title="peak MiB of the phase"),
        color=alt.Color("phase:N", sort=known, scale=alt.Scale(scheme="tableau10")),
        tooltip=["strategy:N", "phase:N", alt.Tooltip("peak_mib:Q", format=",.1f")],
    )
    return _titled(chart, rows, height=alt.Step(9))


def contributions(rows: Sequence[Figures]) -> Any:
    """Draw what each member of the largest combination contributes: the peak without it, above that of the whole."""
    peaks = {tuple(row["strategy"].split(" + ")): row["peak_bytes"] for row in rows if row["status"] == "ok"}
    whole = max(peaks, key=len, default=())
    without = {member: peaks.get((*whole[:at], *whole[at + 1 :])) for at, member in enumerate(whole)}
    if len(whole) < 2 or not all(without.values()):
        return None
    alt = altair()
    values = [{"member": name, "more": (peak - peaks[whole]) / MIB} for name, peak in without.items() if peak]
    bars = alt.Chart(alt.Data(values=values)).mark_bar()
    chart = bars.encode(
        y=alt.Y("member:N", sort="-x", title=None, axis=alt.Axis(labelLimit=260)),
        x=alt.X("more:Q", title=f"MiB more than {' + '.join(whole)} without it"),
        tooltip=["member:N", alt.Tooltip("more:Q", format=",.1f")],
    )
    return _titled(chart, rows, height=alt.Step(24))


def lengths(rows: Sequence[Figures]) -> Any:
    """Draw the peak against the length of the context, both as logarithms; predictions hollow, the budget a line."""
    sized = [
        _plain(row) | {SIZE: row["shape"][SIZE]}
        for row in rows
        if row["shape"].get(SIZE) and row["strategy"] != CONTROL
    ]
    if len({row[SIZE] for row in sized}) < 2:
        return None
    alt = altair()
    measured = [row for row in sized if row["status"] == "ok" and row["peak_bytes"]]
    predicted = [row for row in sized if row["predicted_bytes"]]
    if not measured and not predicted:
        return None
    axis = alt.Axis(values=sorted({row[SIZE] for row in sized}), format=",d")
    x = alt.X(f"{SIZE}:Q", title="tokens", scale=alt.Scale(type="log", base=2, nice=False, padding=15), axis=axis)
    color = alt.Color("strategy:N", legend=alt.Legend(labelLimit=300), sort=None)
    log = alt.Scale(type="log", nice=False, padding=15)
    lines = alt.Chart(alt.Data(values=measured)).mark_line(point=alt.OverlayMarkDef(filled=True, size=50))
    hollow = alt.Chart(alt.Data(values=predicted)).mark_point(filled=False, size=110)
    layers = [
        lines.encode(x=x, y=alt.Y("peak_mib:Q", title="peak MiB", scale=log), color=color, tooltip=TOOLTIP),
        hollow.encode(x=x, y=alt.Y("predicted_mib:Q", scale=log), color=color, tooltip=TOOLTIP),
    ]
    budgets = sorted({row["budget_mib"] for row in sized if row["budget_mib"]})
    layers += [alt.Chart().mark_rule(strokeDash=[6, 4], color="#c33").encode(y=alt.datum(budget)) for budget in budgets]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=f"{rows[0]['suite']} on {rows[0]['place']}")


TOOLTIP = ["strategy:N", "peak_mib:Q", "predicted_mib:Q", "tokens_per_second:Q", "answer:N", "verdict:N", "status:N"]
COMPARED: dict[str, Callable[[Sequence[Figures]], Any]] = {
    "tradeoff": tradeoff,
    "phases": phases,
    "contributions": contributions,
}


def front(rows: Sequence[Figures]) -> list[Figures]:
    """Return the rows that no other beats in both peak and throughput, by growing peak."""
    best: list[Figures] = []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], -row["tokens_per_second"])):
        if not best or row["tokens_per_second"] > best[-1]["tokens_per_second"]:
            best.append(row)
    return best


def _plain(row: Figures) -> Figures:
    """Return what a chart needs of a row, bytes as MiB."""
    names = ("strategy", "status", "verdict", "answer", "peak_bytes", "predicted_bytes", "tokens_per_second")
    sizes = {
        f"{name}_mib": row[f"{name}_bytes"] and row[f"{name}_bytes"] / MIB for name in ("peak", "predicted", "budget")
    }
    return {name: row[name] for name in names} | sizes


def _of_steps(peaks: dict[str, int]) -> dict[str, int]:
    """Return the peaks of the phases within a steady step, and that of the beginning."""
    phases = {name: peaks[name] for name in PHASES if name in peaks}
    for name, peak in peaks.items():
        outer, _, phase = name.rpartition("/")
        if outer == "steady_step" and phase in PHASES:
            phases[phase] = peak
    return phases


def _places(rows: Sequence[Figures]) -> dict[tuple[str, int], list[Figures]]:
    """Part rows by where their labels go: towards the middle, in turn above and below; the control needs none."""
    middle = math.sqrt(min(row["peak_mib"] for row in rows) * max(row["peak_mib"] for row in rows))
    places: dict[tuple[str, int], list[Figures]] = {}
    named = sorted((row for row in rows if row["strategy"] != CONTROL), key=lambda row: row["tokens_per_second"])
    for at, row in enumerate(named):
        side = "left" if row["peak_mib"] <= middle else "right"
        places.setdefault((side, -6 if at % 2 else 7), []).append(row)
    return places


def _verdicts(alt: Any, rows: Sequence[Figures]) -> Any:
    shown = [name for name in VERDICTS if any(row["verdict"] == name for row in rows)]
    return alt.Color("verdict:N", scale=alt.Scale(domain=shown, range=[VERDICTS[name] for name in shown]))


def _titled(chart: Any, rows: Sequence[Figures], height: Any = HEIGHT) -> Any:
    return chart.properties(width=WIDTH, height=height, title=rows[0]["comparison"])
