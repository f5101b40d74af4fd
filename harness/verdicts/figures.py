"""Figures of rows that claims can ask for, each with its interval."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Any

from harness.records import Case, Fit, Phase, Prediction, Record
from harness.verdicts.expressions import ENDED, PREDICTED, Figure, Unknown, exact
from harness.verdicts.judge import UNJUDGED, Row
from harness.verdicts.remarks import WITHHELD

USUAL_RESIDUALS = (-0.12, 0.12)
"""Between these lie nine of ten residuals of predictions; used where too few rows were measured to say."""
ON_ONE_GPU = (-0.01, 0.01)
"""The same for what torch allocates on one GPU: of 56 published runs and 20 of our own none differs by more than 0.4 %
(docs/gpu_predictions.md, results/gpu)."""
OF_SEGMENTS = (-0.07, 0.07)
"""The same for the segments that torch takes on a GPU for what it allocates: the largest of 35 published runs of one
source differs by 6.9 % (docs/gpu_predictions.md)."""
OWN_RESIDUALS = {"predicted_reserved": OF_SEGMENTS, "predicted_need": (ON_ONE_GPU[0], OF_SEGMENTS[1])}
"""Those of figures that have residuals of their own, whatever was measured at the place of a row."""
LEAST_RESIDUALS = 20
ONCE = 0.002
"""The share, beside the meter's resolution, by which a peak that was measured once on a CPU may be another next time:
it was by no more in 95 of 100 rows that were measured three times."""


def _records(row: Row) -> tuple[Record, ...]:
    """Return the records of a row that was measured; raise Unknown for another."""
    if row.status != "ok" or not row.records:
        raise _ended(row)
    return row.records


def _ended(row: Row) -> Unknown:
    return Unknown(f"{row.label}: {row.status}" + (f" ({row.reasons[0]})" if row.reasons else ""))


def _reliable(row: Row) -> tuple[Record, ...]:
    """Return the records of a measured row whose peak can be relied on; raise Unknown for another."""
    records = _records(row)
    _check_doubts(row)
    return records


def _check_doubts(row: Row, alone: bool = False) -> None:
    """Raise Unknown for a row whose peak cannot be relied on, or that of its process `alone`, without its children."""
    doubts = [flag for flag in row.doubts if not (alone and flag == "child_processes")]
    if doubts:
        raise Unknown(f"{row.label}: {WITHHELD[doubts[0]]}")


def _memory(row: Row, phase: str | None, field: str) -> Figure:
    """Return a byte figure of one phase, or of the run: the largest of all phases, or what is held at its end."""
    whole = phase is None and field == "peak_bytes"
    if whole and row.status == "oom_budget" and row.case.budget_bytes:
        # on a device it bounds the segments, which have gaps between what is allocated
        least = row.case.budget_bytes + 1 if row.case.place.device == "cpu" else row.peak_bytes or 0
        return Figure(least, least, math.inf, "B")
    records = _reliable(row)
    if not whole:
        _check_phases(row)
    at_end = phase is None and field == "exit_bytes"
    phases = [_last(record.memory.phases) if at_end else record.memory.phases for record in records]
    runs = [[each for each in run if _is_named(each, phase)] for run in phases]
    sizes = [[size for each in run if (size := getattr(each, field)) is not None] for run in runs]
    values = [max(each) for each in sizes if each]
    if whole:
        values = [] if row.peak_bytes is None else [*(row.span_bytes or (row.peak_bytes,))]
    if not values:
        raise Unknown(f"{row.label} has no {field.replace('_', ' ')}" + (f" of the phase {phase}" if phase else ""))
    return _metered(values, _doubt(row, values))


def _doubt(row: Row, values: Sequence[int]) -> float:
    """Return by how much each of some repetitions may be off, in bytes: by what the meter resolves, and one by more."""
    repeats = sum(record.peak_bytes is not None or bool(record.memory.phases) for record in row.records)
    once = repeats < 2 and row.case.place.device == "cpu"
    return row.resolution + (ONCE * max(values, default=0) if once else 0)


def _last(phases: Sequence[Phase]) -> Sequence[Phase]:
    """Return the last phase that is no part of another, alone: what is held at its end, is at the end of the run."""
    names = {phase.name for phase in phases}
    return [phase for phase in phases if phase.name.rpartition("/")[0] not in names][-1:]


def _check_phases(row: Row) -> None:
    """Raise Unknown for a row on a device: its phases are those of the host, which waits for it."""
    if row.case.place.device != "cpu":
        reason = "phases of a GPU run are not metered one by one: ask for the whole peak, or for a stage"
        raise Unknown(f"{row.label}: {reason}")


def _is_named(phase: Phase, name: str | None) -> bool:
    """Check whether a phase has a name, in whichever part of the run; None is any name."""
    return name in (None, phase.name, phase.name.rpartition("/")[2])


def _metered(values: Sequence[int], doubt: float = 0) -> Figure:
    """Return the largest of what repetitions showed in bytes; it may be any of that, each in doubt by so much."""
    return Figure(max(0, min(values) - doubt), max(values), max(values) + doubt, "B")


def _known(value: float | None, what: str, row: Row, unit: str = "") -> Figure:
    if not isinstance(value, int | float) or not math.isfinite(value):  # a size may be a word
        raise _unknown(what, row)
    return exact(value, unit)


def _unknown(what: str, row: Row) -> Unknown:
    return Unknown(f"{row.label} has no {what}" + (f" ({row.reasons[0]})" if row.reasons else ""))


NOT_BEGUN = frozenset({"unsupported", "skipped_guard", "open"})
"""Statuses of a row that was not run, so that nothing is known of it but what its prediction showed."""


def _rung(row: Row) -> str:
    """Return the rung of the ladder on which the answer of a row stands."""
    if row.answer is None:
        raise Unknown(f"{row.label} has no answer: {row.status}")
    return row.answer


def _outcome(row: Row) -> str:
    """Return how a row ended, "ok" or "error": measured, or where it was not run, tried without its data."""
    tried = row.prediction.prediction if row.prediction else Prediction()
    if row.status in ENDED:
        return row.status
    if row.status not in NOT_BEGUN:
        raise _ended(row)
    if tried.error is None and tried.predicted_peak_bytes is None:
        raise Unknown(f"{row.label}: {row.status}, and its step could not be tried without its data")
    return "ok" if tried.error is None else "error"


def _residual(row: Row) -> Figure:
    """Return how far the measured peak lies from the predicted one, as a share of that."""
    known = _known(row.residual_ratio, "measured peak beside a predicted one", row)
    _check_doubts(row, alone=True)
    peaks = [peak for record in row.records if (peak := record.peak_bytes) is not None]
    if row.predicted_bytes is None or not peaks:
        return known
    return _metered(peaks, _doubt(row, peaks)) / exact(row.predicted_bytes, "B") - exact(1)


def _reserved(row: Row) -> Figure:
    """Return what torch took from the driver of a GPU in segments, above the base."""
    sizes = [size for record in _records(row) if (size := record.memory.reserved_device_bytes) is not None]
    if not sizes:
        raise _unknown("reserved bytes, which torch has on a GPU alone", row)
    return _metered(sizes)


def _predicted_reserved(row: Row) -> Figure:
    """Return what it is predicted to take, above the base as what is measured."""
    prediction = row.prediction.prediction if row.prediction else Prediction()
    reserved = prediction.predicted_reserved_bytes
    above = None if reserved is None else reserved - (prediction.predicted_base_bytes or 0)
    return _known(above, "prediction of reserved bytes", row, "B")


def _predicted_need(row: Row) -> Figure:
    """Return the memory of a GPU that it needs: what is allocated, and no more than the segments that torch takes.

    Before torch fails it gives back segments that hold nothing, so that less than all of them may do.
    """
    allocated, reserved = _predicted(row, None), _predicted_reserved(row)
    return Figure(allocated.low, reserved.value, reserved.high, "B")


def _all_ranks(row: Row) -> Figure:
    """Return what all ranks of a row hold together."""
    sums = [total for record in _reliable(row) if (total := record.memory.all_ranks_bytes) is not None]
    if not sums:
        raise _unknown("sum over ranks", row)
    return _metered(sums, _doubt(row, sums))


def _predicted(row: Row, phase: str | None) -> Figure:
    """Return the predicted peak, or that of one phase."""
    if phase is None:
        return _known(row.predicted_bytes, "prediction", row, "B")
    phases = row.prediction.prediction.predicted_phases if row.prediction else ()
    peaks = [each.peak_bytes for each in phases if _is_named(each, phase)]
    return _known(max(peaks, default=None), f"predicted phase '{phase}'", row, "B")


def usual_residuals(rows: Iterable[Row], case: Case) -> tuple[float, float]:
    """Return between which shares of a prediction nine of ten measured rows at a case's place lie beside theirs."""
    alike = [row for row in rows if row.case.place == case.place]
    residuals = [row.residual_ratio for row in alike if row.residual_ratio is not None]
    if len(residuals) < LEAST_RESIDUALS:
        return ON_ONE_GPU if str(case.place) == "torch/cuda" and case.ranks == 1 else USUAL_RESIDUALS
    cuts = quantiles(residuals, n=20, method="inclusive")
    return min(0.0, cuts[0]), max(0.0, cuts[-1])


def _noted(row: Row, name: str | None) -> Figure:
    """Return a number that the run wrote down, or where nothing ran its prediction."""
    records = (*row.records, *([row.prediction] if row.prediction else []))
    values = [record.extra[name] for record in records if name in record.extra]
    return _known(values[0] if values else None, f"figure '{name}'", row)


def _part(row: Row, what: str, name: str | None) -> Figure:
    """Return what was measured of one `stage` or `kind`, as far as the meter resolves it."""
    if what == "kind" and name == "logits":
        _check_phases(row)  # they are what the phase of the loss adds
    metered = what == "stage" or name in ("activations", "logits")  # the others are sizes of arrays
    records = _records(row)
    if metered:
        _check_doubts(row, alone=True)
    runs = [record.memory.stages if what == "stage" else record.memory.kinds for record in records]
    values = [sizes[str(name)] for sizes in runs if str(name) in sizes]
    if not values:
        raise _unknown(f"{what} '{name}'", row)
    return _metered(values, _doubt(row, values) if metered else 0)


def _predicted_part(row: Row, what: str, name: str | None) -> Figure:
    """Return what is predicted of one `stage` or `kind`."""
    prediction = row.prediction.prediction if row.prediction else Prediction()
    sizes = {"stage": prediction.predicted_stages, "kind": prediction.predicted_kinds}[what]
    return _known(sizes.get(str(name)), f"predicted {what} '{name}'", row, "B")


def _loss(row: Row) -> Figure:
    """Return the loss of the last step of the measured run."""
    losses = _records(row)[0].step_losses
    return _known(losses[-1] if losses else None, "loss", row)


def _longest(row: Row, field: str) -> Figure:
    """Return the limit of a search by `harness fit`: at least the value that passed."""
    fit = row.records[0].limits if row.records else None
    if fit is None:
        raise Unknown(f"{row.label}: no limit was searched: run `harness fit`")
    value = getattr(fit, field)
    known = _known(value, f"{field} limit of {fit.over}", row)
    return replace(known, high=most(fit, known.value)) if field == "longest" and fit.runs else known


def most(fit: Fit, passed: float) -> float:
    """Return what the longest value may be at most, by how its search ended.

    A run that ended for its time or an error, or for want of memory that was not its budget, says nothing of that.
    """
    if fit.failed is not None and fit.how == "oom_budget":
        return fit.failed - 1
    return passed if fit.is_of_workload else math.inf


def _verdict(row: Row) -> str:
    """Return the word that a row earned; raise Unknown where it has none."""
    if row.verdict in UNJUDGED:
        raise _unknown("verdict", row)
    return row.verdict


def rests_on_prediction(name: str, row: Row, part: Mapping[str, Any]) -> bool:
    """Check whether a figure was predicted and not measured; `part` are the keywords that say which part is meant."""
    limits = row.records[0].limits if row.records else None
    supposed = name == "noted" and not any(part.get("figure") in record.extra for record in row.records)
    tried = name == "outcome" and row.status not in ENDED
    return supposed or tried or name in PREDICTED or (name == "longest" and limits is not None and not limits.runs)


FIGURES: dict[str, Callable[[Row, dict[str, Any]], Figure | str]] = {
    "peak": lambda row, own: _memory(row, own.pop("phase", None), "peak_bytes"),
    "held": lambda row, own: _memory(row, own.pop("phase", None), "exit_bytes"),
    "file_bytes": lambda row, own: _memory(row, own.pop("phase", None), "file_bytes"),
    "anonymous_bytes": lambda row, own: _memory(row, own.pop("phase", None), "anon_bytes"),
    "reserved": lambda row, own: _reserved(row),
    "predicted_reserved": lambda row, own: _predicted_reserved(row),
    "predicted_need": lambda row, own: _predicted_need(row),
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
    "loss": lambda row, own: _loss(row),
    "answer": lambda row, own: _rung(row),
    "outcome": lambda row, own: _outcome(row),
    "verdict": lambda row, own: _verdict(row),
}
