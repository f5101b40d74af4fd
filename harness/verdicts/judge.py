"""From records to verdicts: what each strategy costs, what it saves, whether the answer is still right."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from harness.records import Case, Prediction, Record
from harness.records.record import OUT_OF_MEMORY, WRONG
from harness.verdicts import looks
from harness.verdicts.observed import Observed, comparable, grouped, machine_of
from harness.verdicts.pooled import MARGIN, Pooled, Speed

MIB = 1 << 20
MEMORY_MARGIN = 0.02
"""The share of the baseline's peak by which memory must differ."""
CONTROL_FACTOR = 2
"""Memory must differ by so many times as much as the control, which changes nothing, differed."""
UNSTABLE = 0.01
LEAK_STEPS = 5
"""Steps of a run from which on growth is called so: in fewer, an allocator may still settle."""
LEAK_MARGIN = 0.01
SETTLING = 0.05
"""The share of its peak by which a baseline may grow with each step."""
PREDICTION_OFF = 0.10
LOSS_MARGIN = 1e-4
"""How far the losses of the measured run may lie from the baseline's when the answer is to be the same."""
REACHING = 0.05
"""Of savings above this share it is noted where less than half of them reaches a user of the stock allocator."""
LEAST_FOR_PERCENT = 32 * MIB
"""Peaks below this have their residual in bytes: the meter's own error is a large share of them."""
WITHHELD = {
    "unstable": "its peaks differ between repetitions: measure it again on a quiet machine",
    "unsettled": "its memory did not settle before the run: measure it again on a quiet machine",
    "no_reset": "its peak could not be reset: run `harness doctor`",
    "native_regime": "its allocator was not pinned: measure memory on a system with glibc",
    "lower_bound": "its worker died before the peak was read: measure it again",
    "child_processes": "what its child processes hold was not seen: measure it again",
}
"""Flags of a memory measurement that withhold its verdict, and what to do about each."""


@dataclass(frozen=True)
class Row:
    """One case with all that is known about it; None where nothing is, and why in `reasons`.

    `memory` is `less`, `same` or `more` than the baseline; `speed` has the ratio of step times, its interval and its
    word. `step_seconds` is the baseline's median times that ratio. `native_bytes` are the smallest and the largest peak
    of the timed processes, whose allocator is as the system has it, and `native_ratio` the ratio of their medians.
    `at_most_bytes` is what it was to take at most, with the probability `at_most_coverage`, before it was measured.
    """

    case: Case
    status: str
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    peak_phase: str | None = None
    native_bytes: tuple[int, int] | None = None
    native_ratio: float | None = None
    predicted_bytes: int | None = None
    at_most_bytes: int | None = None
    at_most_coverage: float | None = None
    residual_bytes: int | None = None
    residual_ratio: float | None = None
    floor_bytes: int | None = None
    floor_ratio: float | None = None
    step_seconds: float | None = None
    speed: Speed | None = None
    memory: str | None = None
    answer: str | None = None
    answer_reason: str = ""
    loss_difference: float | None = None
    verdict: str = ""
    predicted_phase: str | None = None
    fetch_seconds: float | None = None
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    records: tuple[Record, ...] = field(default=(), repr=False)
    prediction: Record | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return self.case.label


@dataclass(frozen=True)
class Comparison:
    """The rows of one comparison, the baseline first, and notes about all of them.

    `control` is the step time of the control as a multiple of the baseline's: by how much equal things differed.
    """

    case: Case
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    control: Speed | None = None

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines on which peaks and times of it were measured."""
        records = (record for row in self.rows for record in row.records if record.status == "ok")
        measured = (machine_of(record) for record in records if record.slot and record.slot.kind != "numerics")
        return tuple(dict.fromkeys(name for name in measured if name))


def judge(records: Iterable[Record]) -> list[Comparison]:
    """Comparison records by what they are compared to, and judge each group against its baseline."""
    records = list(records)
    rounds = max((record.heading.rounds for record in records), default=0)
    return [_judged(group, rounds) for group in grouped(records)]


def searched(records: Iterable[Record]) -> list[Comparison]:
    """Comparison the limits that `harness fit` searched by what they are compared to, the budget included."""
    groups: dict[str, list[Row]] = {}
    for record in records:
        if record.case is not None and record.limits is not None:
            reasons = (record.limits.reason,) if record.limits.reason else ()
            row = Row(record.case, "searched", reasons=reasons, records=(record,))
            groups.setdefault(record.case.comparison_key, []).append(row)
    return [Comparison(rows[0].case, tuple(rows)) for rows in groups.values()]


def _judged(group: list[Observed], planned: int) -> Comparison:
    baseline = next((observed for observed in group if observed.case.is_baseline), None)
    control = next((observed for observed in group if observed.case.is_control), None)
    times, rounds = comparable(group, planned)
    speeds = looks.replayed(times, looks.planned(rounds)).pooled if any(times.values()) else Pooled({})
    least = _least_difference(baseline, control)
    rows = tuple(_row(observed, baseline, control, speeds, least) for observed in group)
    return Comparison(group[0].case, rows, (*_mixed(group), *_control_notes(speeds, control, baseline)), speeds.control)


def _mixed(group: list[Observed]) -> list[str]:
    """Return notes where figures were taken in different ways, since those never compare."""
    memory = [record for observed in group for record in observed.memory if record.status == "ok"]
    notes = []
    if len({record.memory.regime for record in memory}) > 1:
        notes.append("Peaks were taken under different allocator regimes and do not compare.")
    times = [record for observed in group for record in observed.times.values() if record.status == "ok"]
    if len({machine_of(record) for record in (*memory, *times)}) > 1:
        notes.append("Records of different machines are mixed here and do not compare.")
    return notes


def _control_notes(speeds: Pooled, control: Observed | None, baseline: Observed | None) -> list[str]:
    """Return notes where the control, which changes nothing, differs from the baseline all the same."""
    notes = []
    speed = speeds.control
    if speed is not None and speed.standard_error is not None and 1 not in speed.interval:
        span = f"{speed.ratio:.2f} x ({speed.low:.2f}-{speed.high:.2f})"
        notes.append(f"The control `nothing` took {span} the baseline's time; rows are compared with both.")
    if control is not None and baseline is not None and _usable(control, baseline):
        difference = abs((control.peak or 0) - (baseline.peak or 0))
        if difference > max(baseline.resolution, MEMORY_MARGIN * (baseline.peak or 0)):
            more = f"{difference / MIB:,.1f} MiB"
            notes.append(f"The control `nothing` differs from the baseline by {more}: only twice as much counts here.")
    return notes


def _usable(*observed: Observed) -> bool:
    return all(each.status == "ok" and each.peak is not None for each in observed)


def _least_difference(baseline: Observed | None, control: Observed | None) -> float:
    """Return by how many bytes a peak must differ from the baseline's, but for the meter's resolution."""
    if baseline is None or baseline.peak is None:
        return 0.0
    equal = 0
    if control is not None and _usable(control, baseline):
        equal = abs((control.peak or 0) - baseline.peak)
    return max(MEMORY_MARGIN * baseline.peak, CONTROL_FACTOR * equal)


def _memory(observed: Observed, baseline: Observed | None, least: float) -> str | None:
    """Compare peaks; None where one of them is not known, or not to be believed."""
    if baseline is None or not _usable(observed, baseline) or _doubts(observed) or _doubts(baseline):
        return None
    margin = max(observed.resolution, baseline.resolution, least)
    low, high = (_against(observed, baseline, margin, bound) for bound in (0, 1))
    return low if low == high else None


def _against(observed: Observed, baseline: Observed, margin: float, bound: int) -> str:
    """Compare peaks by one bound of what child processes take, 0 the lower and 1 the upper."""
    children = observed.children[bound] if observed.children else 0
    difference = (observed.own_peak or 0) + children - (baseline.peak or 0)
    if abs(difference) <= margin:
        return "same"
    return "less" if difference < 0 else "more"


def _doubts(observed: Observed) -> list[str]:
    """Return the flags of a row's memory that withhold its verdict."""
    flags = {flag for record in observed.memory for flag in record.flags}
    if observed.children is not None:
        flags.discard("child_processes")
    return [flag for flag in WITHHELD if flag in flags or (flag == "unstable" and _unstable(observed))]


def _unstable(observed: Observed) -> bool:
    """Check whether repetitions differ by more than 1 % and the meter's resolution."""
    peaks = observed.peaks
    return len(peaks) > 1 and max(peaks) - min(peaks) > max(observed.resolution, UNSTABLE * max(peaks))


def _row(observed: Observed, baseline: Observed | None, control: Observed | None, speeds: Pooled, least: float) -> Row:
    case, peak = observed.case, observed.peak
    forecast = observed.predict.prediction if observed.predict else Prediction()
    predicted, at_most = forecast.predicted_peak_bytes, forecast.at_most_bytes
    floor = forecast.floor_bytes
    speed = speeds.control if observed is control else speeds.speeds.get(case.label)
    memory = None if case.is_baseline else _memory(observed, baseline, least)
    answer, answer_reason, difference = _answer(observed, baseline)
    ok, own = observed.status == "ok", observed.own_peak
    other = baseline.peak if baseline is not None and baseline.status == "ok" else None
    first = observed.memory[0] if observed.memory else None
    growth = _growth(observed, baseline)
    ratio = peak / other if ok and peak and other else None
    native_ratio = _native_ratio(observed, baseline)
    verdict = _verdict(observed, baseline, memory, speed, answer)
    return Row(
        case=case,
        status=observed.status,
        peak_bytes=peak,
        peak_ratio=ratio,
        peak_phase=first.memory.peak_phase if first else None,
        native_bytes=(min(observed.natives), max(observed.natives)) if observed.natives else None,
        native_ratio=native_ratio,
        predicted_bytes=predicted,
        at_most_bytes=at_most,
        at_most_coverage=forecast.at_most_coverage,
        predicted_phase=forecast.predicted_phase,
        residual_bytes=own - predicted if ok and own and predicted else None,
        residual_ratio=(own - predicted) / predicted if ok and own and predicted else None,
        floor_bytes=floor,
        floor_ratio=peak / floor if ok and peak and floor else None,
        step_seconds=_step_seconds(observed, baseline, speed),
        fetch_seconds=_fetch(observed),
        speed=speed,
        memory=memory,
        answer=answer,
        answer_reason=answer_reason,
        loss_difference=difference,
        verdict=verdict,
        flags=(*_flags(observed, own, predicted, at_most), *(("growing",) if growth else ())),
        notes=(*_notes(observed, growth), *_native_note(ratio, native_ratio)),
        reasons=(*_reasons(observed), *(_remedies(observed, baseline) if verdict == "withheld" else ())),
        records=(*observed.memory, *observed.times.values(), *([observed.answer] if observed.answer else [])),
        prediction=observed.predict,
    )


def _step_seconds(observed: Observed, baseline: Observed | None, speed: Speed | None) -> float | None:
    """Return the baseline's median step time times the row's ratio; without a baseline the row's own median."""
    reference = baseline if speed is not None and baseline is not None and baseline.seconds else observed
    if not reference.seconds:
        return None
    return median(reference.seconds.values()) * (speed.ratio if speed is not None and reference is baseline else 1.0)


def _native_ratio(observed: Observed, baseline: Observed | None) -> float | None:
    """Return how peaks compare where the allocator is as the system has it."""
    if baseline is None or observed is baseline or not (observed.natives and baseline.natives):
        return None
    other = median(baseline.natives)
    return median(observed.natives) / other if other > 0 else None


def _fetch(observed: Observed) -> float | None:
    """Return the median wait for a batch over all rounds, in seconds."""
    waits = [wait for record in observed.timed.values() for wait in record.times.fetch_seconds]
    return median(waits) if waits else None


def _native_note(ratio: float | None, native_ratio: float | None) -> tuple[str, ...]:
    """Return a note where a saving hardly reaches a user, whose allocator keeps what is freed: less than half of it."""
    if ratio is None or native_ratio is None or ratio >= 1 - REACHING or 1 - native_ratio >= (1 - ratio) / 2:
        return ()
    reached = f"only {1 - native_ratio:.0%}" if native_ratio < 0.995 else "nothing"
    return (f"it saves {1 - ratio:.0%} of the peak, but {reached} where the allocator is as the system starts it",)


def _notes(observed: Observed, growth: float | None) -> tuple[str, ...]:
    """Collect what is to be known of a row, in words: what its parts noted, file pages among the peak, growth."""
    if not observed.memory:
        return ()
    record = observed.memory[0]
    noted = {**(observed.predict.notes if observed.predict else {}), **record.notes}
    notes = [f"{name.replace('_', ' ')}: {note}" for name, note in noted.items()]
    notes += [f"{name.replace('_', ' ')} {_number(value)}" for name, value in record.extra.items() if _is_number(value)]
    pages = max((phase.file_bytes or 0 for phase in record.memory.phases), default=0)
    if "file_backed" in record.flags:
        notes.append(f"{pages / MIB:,.0f} MiB are pages of a file, which the kernel can take back")
    if record.memory.all_ranks_bytes:
        peaks = [rank.peak_bytes / MIB for rank in record.memory.ranks if rank.peak_bytes is not None]
        each = f"{min(peaks):,.1f} to {max(peaks):,.1f} MiB" if peaks else "in one process that was measured whole"
        together = f"{record.memory.all_ranks_bytes / MIB:,.0f} MiB"
        notes.append(f"each of {observed.case.ranks} ranks holds {each}, together {together}")
    if record.child_peak_bound_bytes:
        low, high = (record.child_peak_bytes or 0) / MIB, record.child_peak_bound_bytes / MIB
        notes.append(f"its child processes take {low:,.0f} to {high:,.0f} MiB of it")
    if growth:
        notes.append(f"it grew by {growth / MIB:,.1f} MiB with each step")
    if observed.impossible:
        processes = "process" if observed.impossible == 1 else "processes"
        notes.append(f"{observed.impossible} timed {processes} left out: their clock gave times that no step can take")
    return tuple(notes)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _answer(observed: Observed, baseline: Observed | None) -> tuple[str | None, str, float | None]:
    """Join the rung of the ladder with what the measured run itself showed: its losses and its batches."""
    verdict = observed.answer.numerics if observed.answer else None
    rung, reason = (verdict.verdict, verdict.reason) if verdict else (None, "")
    if observed.answer is not None and observed.answer.status != "ok":
        reason = str(observed.answer.evidence.get("message", observed.answer.status))
    if (
        baseline is None
        or observed.status != "ok"
        or baseline.status != "ok"
        or not (observed.memory and baseline.memory)
    ):
        return rung, reason, None
    own, other = observed.memory[0].memory, baseline.memory[0].memory
    difference = max((abs(a - b) / abs(b) for a, b in zip(own.losses, other.losses, strict=False) if b), default=None)
    if own.feeds == "same" and own.batches_digest != other.batches_digest:
        return "invalid", "it trained on other batches than the baseline", difference
    unchanged = observed.memory[0].notes.get("unchanged")
    if unchanged is not None and own.losses == other.losses:
        return "bit_exact", f"it left everything as it was: {unchanged}", difference
    exact = rung in ("bit_exact", "reassociated")
    if exact and own.feeds == "other":
        return "approximate", "it was fed other batches than the baseline", difference
    if exact and difference is not None and difference > LOSS_MARGIN:
        return "diverged", f"losses of the measured run differ by {difference:.1e}", difference
    return rung, reason, difference


def _verdict(
    observed: Observed, baseline: Observed | None, memory: str | None, speed: Speed | None, answer: str | None
) -> str:
    """Name the trade; `enables` where the baseline does not fit, `fails` where the row itself does not run."""
    if observed.status in ("unsupported", "open"):
        return "untested"
    if observed.status == "skipped_guard":
        return "skipped"
    if observed.status != "ok":
        return "fails"
    if answer in WRONG:
        return "wrong"
    if observed.case.is_baseline:
        return "baseline"
    if baseline is not None and baseline.status in OUT_OF_MEMORY:
        return "enables"
    if memory is None or answer is None:
        return "withheld"
    return trade(memory, speed)


def trade(memory: str, speed: Speed | None) -> str:
    """Name the trade of memory for time; "time open" where the interval does not say, and nothing of it untimed."""
    name = {"less": "saves", "same": "same", "more": "costs"}[memory]
    if speed is None or speed.standard_error is None:
        return name
    if memory == "less":
        return "wins" if speed.high < MARGIN else "trades" if speed.word == "slower" else f"{name}, time open"
    if memory == "more":
        return "loses" if speed.low > 1 / MARGIN else "trades" if speed.word == "faster" else f"{name}, time open"
    return {"faster": "wins", "slower": "loses", "within 5 %": "same"}.get(speed.word, "same, time open")


def _flags(observed: Observed, peak: int | None, predicted: int | None, at_most: int | None) -> tuple[str, ...]:
    flags = {flag: None for record in (*observed.memory, *observed.times.values()) for flag in record.flags}
    if _unstable(observed):
        flags["unstable"] = None
    if observed.impossible:
        flags["impossible_times"] = None
    known = observed.status == "ok" and peak and predicted and max(peak, predicted) >= LEAST_FOR_PERCENT
    if known and abs((peak or 0) - (predicted or 0)) > PREDICTION_OFF * (predicted or 0):
        flags["prediction_off"] = None
    if observed.status == "ok" and (peak or 0) > (at_most or math.inf):
        flags["above_bound"] = None
    return tuple(flags)


def _growth(observed: Observed, baseline: Observed | None) -> float | None:
    """Return the bytes by which a run grew with each step, where that is more than the baseline's did: a leak.

    What settles slowly over the few steps of a run grows in the baseline as well, which has nothing to be compared with
    and must grow by more; pages of a file are the kernel's to take back.
    """
    record = observed.memory[0] if observed.memory else None
    if record is None or record.memory.slope_bytes_per_step is None or "file_backed" in record.flags:
        return None
    if len(record.memory.losses) < LEAK_STEPS:
        return None
    other = baseline.memory[0] if baseline is not None and observed is not baseline and baseline.memory else None
    settling = max(0.0, other.memory.slope_bytes_per_step or 0.0) if other is not None else 0.0
    more = record.memory.slope_bytes_per_step - settling
    margin = LEAK_MARGIN if other is not None else SETTLING
    least = max(record.memory.resolution_bytes or 0, margin * (record.memory.peak_host_bytes or 0))
    return record.memory.slope_bytes_per_step if more > least else None


def _failure(record: Record) -> str:
    """Return in a few words why a run ended: what was asked for and where, or the message of the error."""
    evidence, where = record.evidence, record.evidence.get("phase")
    if record.status in OUT_OF_MEMORY and _is_number(evidence.get("request_bytes")):
        reason = f"asked for {evidence['request_bytes'] / MIB:,.0f} MiB more"
    else:
        reason = str(evidence.get("message", record.status))
    return f"{reason} in {where}" if where else reason


def _reasons(observed: Observed) -> tuple[str, ...]:
    reasons = [_failure(record) for record in observed.memory if record.status != "ok"]
    if observed.status != "unsupported" and observed.predict is not None:
        missing = observed.predict.missing.get("predicted_peak_bytes")
        reasons += [f"no prediction: {missing}"] if missing else []
    return tuple(dict.fromkeys(reasons))


def _remedies(observed: Observed, baseline: Observed | None) -> list[str]:
    """Return why the verdict of a row that ran is withheld, each with what to do about it."""
    if baseline is None:
        return ["no verdict: its baseline is not among these records: run the whole suite"]
    if baseline.status == "open":
        return ["no verdict: the baseline was not measured yet: run the suite again, which goes on where it stopped"]
    if baseline.status != "ok":
        return [f"no verdict: the baseline ended with {baseline.status}: mend that, and run the suite with --fresh"]
    remedies = [f"no verdict: {WITHHELD[flag]}" for flag in _doubts(observed)]
    remedies += [f"no verdict: of the baseline, {WITHHELD[flag]}" for flag in _doubts(baseline)]
    if not remedies and observed.children is not None:
        remedies.append("no verdict: whether it takes more hangs on what its child processes share, see their bounds")
    if not remedies and not _usable(observed, baseline):
        remedies.append("no verdict: a peak is missing: run `harness doctor`")
    if observed.answer is None:
        remedies.append("no verdict: its answer was not compared: run the suite again, which goes on where it stopped")
    elif observed.answer.numerics is None:
        remedies.append("no verdict: its answer could not be compared: mend that, and run the suite with --fresh")
    return remedies


def timed_rows(tables: Sequence[Comparison]) -> list[tuple[Comparison, Row]]:
    """Return every row whose step time is compared with its baseline's, controls left out."""
    return [(table, row) for table in tables for row in table.rows if row.speed and not row.case.is_control]
