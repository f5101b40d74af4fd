"""Figures of rows that claims can ask for, each with its interval."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles, stdev
from typing import Any

from harness.records import Prediction, Record
from harness.verdicts import dunnett
from harness.verdicts.expressions import PREDICTED, Figure, Open, Unknown, exact
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.observed import of_steps, possible, step_time
from harness.verdicts.pooled import BASELINES, SHORTEST_SECONDS, Pooled, pooled

USUAL_RESIDUALS = (-0.12, 0.12)
"""Between these lie nine of ten residuals of predictions; used where too few rows were measured to say."""


LEAST_RESIDUALS = 20
LEAST_ROUNDS_APART = 3


def _memory(row: Row, phase: str | None, field: str) -> Figure:
    """Return a byte figure of one phase, or the peak of all."""
    if row.status == "oom_budget" and row.case.budget_bytes and phase is None:
        return Figure(row.case.budget_bytes, row.case.budget_bytes, math.inf, "B")
    if row.status != "ok" or not row.records:
        raise Unknown(f"{row.label}: {row.status}" + (f" ({row.reasons[0]})" if row.reasons else ""))
    resolution = row.records[0].memory.resolution_bytes or 0
    if phase is None and field == "peak_bytes":
        value = row.peak_bytes
    else:
        names = [
            each for each in row.records[0].memory.phases if phase in (None, each.name, each.name.rpartition("/")[2])
        ]
        value = max((getattr(each, field) for each in names if getattr(each, field) is not None), default=None)
    if value is None:
        raise Unknown(f"{row.label} has no {field.replace('_', ' ')}" + (f" of the phase {phase}" if phase else ""))
    return Figure(max(0, value - resolution), value, value + resolution, "B")


def _known(value: float | None, what: str, row: Row, unit: str = "") -> Figure:
    if not isinstance(value, int | float) or not math.isfinite(value):  # a size may be a word
        reason = f" ({row.reasons[0]})" if row.reasons else ""
        raise Unknown(f"{row.label} has no {what}{reason}")
    return exact(value, unit)


ENDED = ("ok", "error")
"""The two ways in which a row may have ended that say something of its code."""


def _rung(row: Row) -> str:
    """Return the rung of the ladder on which the answer of a row stands."""
    if row.answer is None:
        raise Unknown(f"{row.label} has no answer: {row.status}")
    return row.answer


def _outcome(row: Row) -> str:
    """Return how a row ended, measured or else tried without its data: "ok" or "error"."""
    tried = row.prediction.prediction if row.prediction else Prediction()
    if row.status in ENDED:
        return row.status
    if tried.error is None and tried.predicted_peak_bytes is None:
        raise Unknown(f"{row.label}: {row.status}, and its step could not be tried without its data")
    return "ok" if tried.error is None else "error"


def _residual(row: Row) -> Figure:
    """Return how far the measured peak lies from the predicted one, as a share of that."""
    known = _known(row.residual_ratio, "measured peak beside a predicted one", row)
    resolution = (row.records[0].memory.resolution_bytes or 0) if row.records else 0
    doubt = resolution / row.predicted_bytes if row.predicted_bytes else 0.0
    return Figure(known.value - doubt, known.value, known.value + doubt)


def _all_ranks(row: Row) -> Figure:
    """Return what all ranks of a row hold together."""
    record = row.records[0] if row.records else Record()
    return _known(record.memory.all_ranks_bytes, "sum over ranks", row, "B")


def _predicted(row: Row, phase: str | None) -> Figure:
    """Return the predicted peak, or that of one phase."""
    if phase is None:
        return _known(row.predicted_bytes, "prediction", row, "B")
    phases = row.prediction.prediction.predicted_phases if row.prediction else ()
    peaks = [each.peak_bytes for each in phases if phase in (each.name, each.name.rpartition("/")[2])]
    return _known(max(peaks, default=None), f"predicted phase '{phase}'", row, "B")


def pooled_times(
    table: Comparison, field: str = "step_seconds", baselines: Sequence[str] = BASELINES
) -> tuple[dict[str, dict[Any, float]], Pooled]:
    """Return a time of each process of a comparison, by row, round and block, and what they say together.

    Of steps it is the step time, of anything else the median. Rows are compared with `baselines`.
    """
    times: dict[str, dict[Any, float]] = {}
    for row in table.rows:
        for record in row.records:
            values = getattr(record.times, field)
            if record.slot and record.slot.kind == "time" and step_time(record) is not None and values:
                uneven = record.times.uneven
                typical = of_steps(values, uneven) if field == "step_seconds" or uneven else median(values)
                seconds = max(typical, SHORTEST_SECONDS)  # a batch that is there already takes no time
                if possible(seconds):
                    times.setdefault(row.label, {})[record.slot.round, record.slot.block] = seconds
    return times, pooled(times, baselines)


def seconds_beside(row: Row, table: Comparison, field: str, error: float, anchor: str) -> Figure:
    """Return a time: that of the row labelled `anchor`, taken as exact, times the row's ratio to it.

    Rows of one table ran within seconds of each other, so that their ratio has less doubt than the time of either.
    Where the anchor is the baseline, rows are compared with all baselines.
    """
    baselines = BASELINES if anchor == BASELINES[0] else (anchor,)
    times, group = pooled_times(table, field, baselines)
    for label in (row.label, anchor):
        if label not in times:
            raise Unknown(f"{label} was not timed")
    reference = exact(median(times[anchor].values()), "s")
    if row.label == anchor:
        return reference
    speed = group.control if row.label in baselines else group.speeds.get(row.label)
    interval = speed.interval_at(error) if speed is not None else None
    if speed is None or interval is None:
        raise Open(f"{row.label} was timed in {_rounds(times[row.label])} beside too few others")
    return Figure(interval.low, speed.ratio, interval.high) * reference


def seconds_apart(row: Row, table: Comparison, field: str, error: float) -> Figure:
    """Return a time by itself, by the scatter of its rounds, which differ by the machine's drift as well.

    Of too few rounds it is the time of the baseline, which has more, times the row's ratio to it.
    """
    times, _ = pooled_times(table, field)
    if row.label not in times:
        raise Unknown(f"{row.label} was not timed")
    by_itself = len(times[row.label]) >= LEAST_ROUNDS_APART or BASELINES[0] not in times
    label = row.label if by_itself else BASELINES[0]
    if len(times[label]) < LEAST_ROUNDS_APART:
        raise Open(f"{label} was timed in {_rounds(times[label])}, and times apart need {LEAST_ROUNDS_APART}")
    logs = [math.log(seconds) for seconds in times[label].values()]
    width = dunnett.quantile(1, 0.0, len(logs) - 1, error) * stdev(logs) / math.sqrt(len(logs))
    middle = sum(logs) / len(logs)
    own = Figure(math.exp(middle - width), math.exp(middle), math.exp(middle + width), "s")
    if by_itself:
        return own
    return own * (seconds_beside(row, table, field, error, label) / exact(median(times[label].values()), "s"))


def _rounds(times: Mapping[Any, float]) -> str:
    return f"{len(times)} round{'s' if len(times) > 1 else ''}"


def with_residuals(figure: Figure, row: Row, tables: Sequence[Comparison]) -> Figure:
    """Widen a prediction by what nine of ten measured rows of its backend were beside theirs."""
    backend = row.case.place.backend
    rows = (each for table in tables for each in table.rows if each.case.place.backend == backend)
    residuals = [each.residual_ratio for each in rows if each.residual_ratio is not None]
    low, high = USUAL_RESIDUALS
    if len(residuals) >= LEAST_RESIDUALS:
        cuts = quantiles(residuals, n=20, method="inclusive")
        low, high = min(0.0, cuts[0]), max(0.0, cuts[-1])
    return Figure(figure.low * (1 + low), figure.value, figure.high * (1 + high), figure.unit)


def _noted(row: Row, name: str | None) -> Figure:
    """Return a number that the run wrote down, or where nothing ran its prediction."""
    records = (*row.records, *([row.prediction] if row.prediction else []))
    values = [record.extra[name] for record in records if name in record.extra]
    return _known(values[0] if values else None, f"figure '{name}'", row)


def _part(row: Row, what: str, name: str | None) -> Figure:
    """Return what was measured of one `stage` or `kind`, as far as the meter resolves it."""
    if row.status != "ok" or not row.records:
        raise Unknown(f"{row.label}: {row.status}" + (f" ({row.reasons[0]})" if row.reasons else ""))
    memory = row.records[0].memory
    known = _known({"stage": memory.stages, "kind": memory.kinds}[what].get(str(name)), f"{what} '{name}'", row, "B")
    metered = what == "stage" or name in ("activations", "logits")  # the others are sizes of arrays
    resolution = (memory.resolution_bytes or 0) if metered else 0
    return Figure(max(0, known.value - resolution), known.value, known.value + resolution, "B")


def _predicted_part(row: Row, what: str, name: str | None) -> Figure:
    """Return what is predicted of one `stage` or `kind`."""
    prediction = row.prediction.prediction if row.prediction else Prediction()
    sizes = {"stage": prediction.predicted_stages, "kind": prediction.predicted_kinds}[what]
    return _known(sizes.get(str(name)), f"predicted {what} '{name}'", row, "B")


def _longest(row: Row, field: str) -> Figure:
    """Return the longest value that `harness fit` found: at least what passed, and less than what failed."""
    fit = row.records[0].limits if row.records else None
    if fit is None:
        raise Unknown(f"{row.label}: no limit was searched: run `harness fit`")
    value = getattr(fit, field)
    known = _known(value, f"{field} limit of {fit.over}", row)
    return replace(known, high=fit.failed or known.value) if field == "longest" and fit.runs else known


def rests_on_prediction(name: str, row: Row) -> bool:
    """Check whether a figure was predicted and not measured."""
    limits = row.records[0].limits if row.records else None
    supposed = name == "noted" and not row.records
    tried = name == "outcome" and row.status not in ENDED
    return supposed or tried or name in PREDICTED or (name == "longest" and limits is not None and not limits.runs)


FIGURES: dict[str, Callable[[Row, dict[str, Any]], Figure | str]] = {
    "peak": lambda row, own: _memory(row, own.pop("phase", None), "peak_bytes"),
    "held": lambda row, own: _memory(row, own.pop("phase", None), "exit_bytes"),
    "file_bytes": lambda row, own: _memory(row, own.pop("phase", None), "file_bytes"),
    "anonymous_bytes": lambda row, own: _memory(row, own.pop("phase", None), "anon_bytes"),
    "all_ranks": lambda row, own: _all_ranks(row),
    "predicted": lambda row, own: _predicted(row, own.pop("phase", None)),
    "stage": lambda row, own: _part(row, "stage", own.pop("of", None)),
    "kind": lambda row, own: _part(row, "kind", own.pop("of", None)),
    "predicted_stage": lambda row, own: _predicted_part(row, "stage", own.pop("of", None)),
    "predicted_kind": lambda row, own: _predicted_part(row, "kind", own.pop("of", None)),
    "residual": lambda row, own: _residual(row),
    "floor": lambda row, own: _known(row.floor_bytes, "floor", row, "B"),
    "parameters": lambda row, own: _known(
        row.prediction.prediction.parameters if row.prediction else None, "count of parameters", row
    ),
    "longest": lambda row, own: _longest(row, "longest"),
    "foretold": lambda row, own: _longest(row, "predicted"),
    "noted": lambda row, own: _noted(row, own.pop("figure", None)),
    "size": lambda row, own: _known(row.case.shape.get(str(own.pop("of", ""))), "such size", row),
    "answer": lambda row, own: _rung(row),
    "outcome": lambda row, own: _outcome(row),
    "verdict": lambda row, own: row.verdict,
}
