"""From records to verdicts: what each strategy costs, what it saves, whether the answer is still right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from harness.contract.instruments import WHOLE
from harness.records import Case, Prediction, Record
from harness.records.record import OPEN_STATUSES, OUT_OF_MEMORY, WRONG
from harness.verdicts import looks, remarks
from harness.verdicts.observed import Observed, comparable, grouped, machine_of, resolution_of
from harness.verdicts.pooled import BASELINES, MARGIN, Pooled, Speed, Times

MIB = 1 << 20
MEMORY_MARGIN = 0.02
"""The share of the baseline's peak by which memory must differ."""
LEAST_NATIVE = 4 * MIB
"""What a baseline takes at least, above its base, where peaks of the usual allocator have a ratio: below it they are of
what threads and libraries keep."""
UNJUDGED = frozenset({"", "untested", "skipped", "withheld"})
"""What stands for the verdict of a row that was not measured, or of which nothing can be said."""
CONTROL_FACTOR = 2
"""Memory must differ by so many times as much as the control, which changes nothing, differed."""
LOSS_MARGIN = 1e-4
"""How far the losses of the measured run may lie from the baseline's when the answer is to be the same."""
LOSS_STEPS = 10
"""Steps whose losses are compared: training doubles what rounding differs by from one step to the next, or nearly."""
FED_OTHERS = "it was fed other batches than the baseline"


@dataclass(frozen=True)
class Row:
    """One case with all that is known about it; None where nothing is, and why in `reasons`.

    `memory` is `less`, `same` or `more` than the baseline; `speed` has the ratio of step times, its interval and its
    word. `step_seconds` is the mean of the baseline and the control times that ratio. `span_bytes` are the least and
    the largest peak that it may have, by its repetitions and child processes; the largest is `peak_bytes`. By more than
    `margin_bytes` it must differ from the baseline's to be less or more.
    `native_bytes` are the smallest and the largest peak of the timed processes, whose allocator is as the system has
    it, and `native_ratio` the ratio of their medians. `at_most_bytes` is what it was to take at most, with the
    probability `at_most_coverage`, before it was measured. `doubts` are those of its flags for which its peak cannot be
    relied on.
    """

    case: Case
    status: str
    peak_bytes: int | None = None
    span_bytes: tuple[int, int] | None = None
    peak_ratio: float | None = None
    margin_bytes: float | None = None
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
    doubts: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    records: tuple[Record, ...] = field(default=(), repr=False)
    prediction: Record | None = field(default=None, repr=False)

    @property
    def whole_peak_bytes(self) -> int | None:
        """The peak of a row that ran to its end; what it had taken when it failed is none."""
        return self.peak_bytes if self.status == "ok" else None

    @property
    def failed_answer(self) -> Record | None:
        """The record of a comparison of answers that failed, as it would again; None where there is none."""
        compared = (record for record in self.records if record.slot is not None and record.slot.kind == "numerics")
        return next((each for each in compared if not each.numerics and each.status not in OPEN_STATUSES), None)

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def largest(self) -> Record | None:
        """The repetition whose peak is that of the row, beside child processes; without a peak the first record."""
        return _largest(self.records)

    @property
    def machine(self) -> str:
        """The machine that it ran on, several joined; where it did not run, one that anything is known from."""
        ran = [record for record in self.records if record.slot is not None and record.slot.kind != "numerics"]
        known = [*self.records, *([self.prediction] if self.prediction is not None else [])]
        names = dict.fromkeys(filter(None, map(machine_of, ran)))
        return " and ".join(names) or next(filter(None, map(machine_of, known)), "")

    @property
    def host_bytes(self) -> int | None:
        """What a run on a device held of the host's memory at most; None on a CPU, where that is the peak."""
        seen = (record.memory.peak_host_bytes or 0 for record in self.records)
        return (max(seen, default=0) or None) if self.case.place.device != "cpu" else None

    @property
    def resolution(self) -> int:
        """The smallest difference in bytes that its meters resolve."""
        return resolution_of(self.case, self.records)


@dataclass(frozen=True)
class Comparison:
    """The rows of one comparison, the baseline first, and notes about all of them.

    `control` is the step time of the control as a multiple of the baseline's: by how much equal things differed.
    `rounds` are those that were planned at most, 0 where that is not known; `timed_rounds` are the first ones
    that count, None where all do.
    `unit_seconds` is the step time of which ratios are multiples: the mean of the baseline and the control.
    """

    case: Case
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    control: Speed | None = None
    rounds: int = 0
    timed_rounds: int | None = None
    unit_seconds: float | None = None

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines on which peaks and times of it were measured."""
        records = (record for row in self.rows for record in row.records if record.status == "ok")
        measured = (machine_of(record) for record in records if record.slot and record.slot.kind != "numerics")
        return tuple(dict.fromkeys(name for name in measured if name))


def judge(records: Iterable[Record]) -> list[Comparison]:
    """Group records by what they are compared to, and judge each group against its baseline."""
    records = list(records)
    rounds = max((record.heading.rounds for record in records), default=0)
    return [_judged(group, rounds) for group in grouped(records)]


def searched(records: Iterable[Record]) -> list[Comparison]:
    """Group the limits that `harness fit` searched by what they are compared to, the budget included."""
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
    speeds = looks.concluded(times, looks.planned(rounds)) if any(times.values()) else Pooled({})
    unit = _unit_seconds(baseline, control, speeds.control)
    rows = tuple(_row(observed, baseline, control, speeds, unit) for observed in group)
    notes = (*_mixed(group), *_mark_notes(times), *_control_notes(speeds, control, baseline))
    timed = max((number + 1 for each in times.values() for number, _ in each), default=0)
    return Comparison(group[0].case, rows, notes, speeds.control, rounds, timed, unit)


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


def _mark_notes(times: Times) -> list[str]:
    """Return a note where the baseline was timed in fewer than half as many rounds as the control."""
    rounds, others = (len({number for number, _ in times.get(name, ())}) for name in BASELINES)
    if 2 * rounds >= others:
        return []
    share = "alone" if not rounds else "above all"
    return [f"The baseline was timed in {rounds} of {others} rounds: times are compared with the control {share}."]


def _control_notes(speeds: Pooled, control: Observed | None, baseline: Observed | None) -> list[str]:
    """Return notes where the control, which changes nothing, differs from the baseline all the same."""
    notes = []
    speed = speeds.control
    if speed is not None and speed.standard_error is not None and 1 not in speed.interval:
        notes.append(f"The control `nothing` took {speed} the baseline's time; rows are compared with both.")
    difference = _difference_of_equals(baseline, control)
    if baseline is not None and difference > max(baseline.resolution, MEMORY_MARGIN * (baseline.peak or 0)):
        more = f"{difference / MIB:,.1f} MiB"
        notes.append(
            f"The control `nothing` differs from the baseline by {more}: a difference counts here from twice that."
        )
    return notes


def _difference_of_equals(baseline: Observed | None, control: Observed | None) -> int:
    """Return by how many bytes the peak of the control differs from the baseline's; 0 where one is not to be relied on.

    Such a control says nothing of the meter, and must not hide what other rows save.
    """
    if baseline is None or control is None or not (_is_sound(baseline) and _is_sound(control)):
        return 0
    return abs((control.peak or 0) - (baseline.peak or 0))


def _is_sound(observed: Observed) -> bool:
    """Check whether the peak of a row is known and can be relied on."""
    return observed.usable and not remarks.doubts(observed)


def _margin(observed: Observed, baseline: Observed | None, control: Observed | None) -> float | None:
    """Return by how many bytes a peak must differ from the baseline's; None where one of the two does not compare."""
    if baseline is None or not (_is_sound(observed) and _is_sound(baseline)):
        return None
    least = max(MEMORY_MARGIN * (baseline.peak or 0), CONTROL_FACTOR * _difference_of_equals(baseline, control))
    return max(observed.resolution, baseline.resolution, least)


def _memory(observed: Observed, baseline: Observed, margin: float) -> str | None:
    """Compare peaks; None where repetitions give different words."""
    (lowest, highest), (floor, ceiling) = observed.span, baseline.span
    words = {_word(difference, margin) for difference in (lowest - ceiling, highest - floor)}
    return words.pop() if len(words) == 1 else None


def _word(difference: int, margin: float) -> str:
    if abs(difference) <= margin:
        return "same"
    return "less" if difference < 0 else "more"


def _row(
    observed: Observed,
    baseline: Observed | None,
    control: Observed | None,
    speeds: Pooled,
    unit: float | None,
) -> Row:
    case, peak = observed.case, observed.peak
    forecast = observed.predict.prediction if observed.predict else Prediction()
    predicted, floor = forecast.predicted_peak_bytes, forecast.floor_bytes
    speed = speeds.control if observed is control else speeds.speeds.get(case.label)
    margin = None if case.is_baseline else _margin(observed, baseline, control)
    memory = None if margin is None or baseline is None else _memory(observed, baseline, margin)
    answer, answer_reason, difference = _answer(observed, baseline)
    ok, own, largest = observed.status == "ok", observed.own_peak, _largest(observed.memory)
    other = baseline.peak if baseline is not None and baseline.status == "ok" else None
    growth = remarks.growth(observed, baseline)
    ratio = peak / other if ok and peak and other else None
    native_ratio = _native_ratio(observed, baseline)
    verdict = _verdict(observed, baseline, memory, speed, answer)
    return Row(
        case=case,
        status=observed.status,
        peak_bytes=peak,
        span_bytes=observed.span if peak is not None else None,
        peak_ratio=ratio,
        margin_bytes=margin,
        peak_phase=largest.memory.peak_phase if largest else None,
        native_bytes=(min(observed.natives), max(observed.natives)) if observed.natives else None,
        native_ratio=native_ratio,
        predicted_bytes=predicted,
        at_most_bytes=forecast.at_most_bytes,
        at_most_coverage=forecast.at_most_coverage,
        predicted_phase=forecast.predicted_phase,
        residual_bytes=own - predicted if ok and own and predicted else None,
        residual_ratio=(own - predicted) / predicted if ok and own and predicted else None,
        floor_bytes=floor,
        floor_ratio=peak / floor if ok and peak and floor else None,
        step_seconds=_step_seconds(observed, baseline, control, speed, unit),
        fetch_seconds=_fetch(observed),
        speed=speed,
        memory=memory,
        answer=answer,
        answer_reason=answer_reason,
        loss_difference=difference,
        verdict=verdict,
        flags=remarks.flags(observed, growth),
        doubts=tuple(remarks.doubts(observed)),
        notes=(
            *remarks.notes(observed, growth),
            *(remarks.saving_note(ratio, native_ratio) if memory == "less" else ()),
            *remarks.warnings(observed, answer),
        ),
        reasons=(
            *remarks.reasons(observed),
            *(remarks.withheld(observed, baseline, memory) if verdict == "withheld" else ()),
        ),
        records=(*observed.memory, *observed.times.values(), *([observed.answer] if observed.answer else [])),
        prediction=observed.predict,
    )


def _unit_seconds(baseline: Observed | None, control: Observed | None, between: Speed | None) -> float | None:
    """Return what ratios are multiples of, in seconds: the mean of both baselines' processes on the ln scale.

    The baseline has its median, and the control that times the ratio `between` them. Where the baseline was not timed
    the control stands for both; None without either.
    """
    mark = next((each for each in (baseline, control) if each is not None and each.seconds), None)
    if mark is None:
        return None
    seconds = median(mark.seconds.values())
    if mark is control or control is None or between is None:
        return seconds
    return seconds * between.ratio ** (len(control.seconds) / (len(control.seconds) + len(mark.seconds)))


def _step_seconds(
    observed: Observed, baseline: Observed | None, control: Observed | None, speed: Speed | None, unit: float | None
) -> float | None:
    """Return a row's ratio times what that is a multiple of; the baseline has its own median, as a row without either.

    The ratio of the control is one to the baseline alone.
    """
    if speed is None or unit is None:
        return median(observed.seconds.values()) if observed.seconds else None
    if observed is control and baseline is not None and baseline.seconds:
        return median(baseline.seconds.values()) * speed.ratio
    return unit * speed.ratio


def _largest(records: Sequence[Record]) -> Record | None:
    """Return the first record with the largest peak; without any the first record."""
    return max(records, key=lambda record: record.peak_bytes or 0, default=None)


def _native_ratio(observed: Observed, baseline: Observed | None) -> float | None:
    """Return how peaks compare where the allocator is as the system has it; None where timed processes lack a peak."""
    if baseline is None or observed is baseline or not (observed.natives and baseline.natives):
        return None
    if _is_beyond_steps(observed) or _is_beyond_steps(baseline):
        return None
    other = median(baseline.natives)
    return median(observed.natives) / other if other >= LEAST_NATIVE else None


def _is_beyond_steps(observed: Observed) -> bool:
    """Check whether a peak has what a timed process has not, or does not count: child processes, or a run's end."""
    phases = (phase for record in observed.memory for phase in (record.memory.peak_phase or "").split(", "))
    return any(phase in WHOLE for phase in phases) or observed.children is not None


def _fetch(observed: Observed) -> float | None:
    """Return the median wait for a batch over all rounds, in seconds; on a device it is that for the step before."""
    if observed.case.place.device != "cpu":
        return None
    waits = [wait for record in observed.timed.values() for wait in record.times.fetch_seconds]
    return median(waits) if waits else None


def _answer(observed: Observed, baseline: Observed | None) -> tuple[str | None, str, float | None]:
    """Join the rung of the ladder with what the measured run itself showed: its losses and its batches."""
    verdict = observed.answer.numerics if observed.answer else None
    rung, reason = (verdict.verdict, verdict.reason) if verdict else (None, "")
    if observed.answer is not None and observed.answer.status != "ok":
        reason = remarks.message(observed.answer)
    for run, whose in ((observed, "its"), (baseline, "the baseline's")):
        if run is not None and run.status == "invalid_output" and rung not in WRONG:
            return None, f"{whose} measured run gave no valid result", None
    if observed.status != "ok" or not observed.memory:
        return rung, reason, None
    own, unchanged = observed.memory[0].memory, observed.memory[0].notes.get("unchanged")
    exact = rung in ("bit_exact", "reassociated")
    if baseline is None or baseline.status != "ok" or not baseline.memory:
        fed_others = exact and own.feeds == "other" and unchanged is None
        return ("approximate", FED_OTHERS, None) if fed_others else (rung, reason, None)
    other = baseline.memory[0].memory
    losses = islice(zip(own.losses, other.losses, strict=False), LOSS_STEPS)
    difference = max((abs(a - b) / abs(b) for a, b in losses if b), default=None)
    if own.feeds == "same" and own.batches_digest != other.batches_digest:
        return "invalid", "it trained on other batches than the baseline", difference
    if unchanged is not None and own.losses == other.losses:
        return "bit_exact", f"it left everything as it was: {unchanged}", difference
    if exact and own.feeds == "other":
        return "approximate", FED_OTHERS, difference
    if exact and difference is not None and difference > LOSS_MARGIN:
        return "diverged", f"losses of the measured run differ by {difference:.1e}", difference
    if rung == "bit_exact" and difference:
        return (
            "reassociated",
            f"equal in each bit at the small size; at this one losses differ by {difference:.1e}",
            difference,
        )
    return rung, reason, difference


def _verdict(
    observed: Observed, baseline: Observed | None, memory: str | None, speed: Speed | None, answer: str | None
) -> str:
    """Name the trade; `enables` where the baseline ran out of memory, `fails` where the row itself does not run."""
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
        word = "enables" if observed.usable and not remarks.doubts(observed) else None
    else:
        word = None if memory is None else trade(memory, speed)
    if word is None or answer is None:
        return "withheld"
    return "control" if observed.case.is_control else word


def trade(memory: str, speed: Speed | None) -> str:
    """Name the trade of memory for time; "time open" where the interval does not say, and nothing of it untimed."""
    name = {"less": "saves", "same": "same memory", "more": "costs"}[memory]
    if speed is None or speed.standard_error is None:
        return name
    if memory == "less":
        return "wins" if speed.high < MARGIN else "trades" if speed.word == "slower" else f"{name}, time open"
    if memory == "more":
        return "loses" if speed.low > 1 / MARGIN else "trades" if speed.word == "faster" else f"{name}, time open"
    return {"faster": "wins", "slower": "loses", "within 5 %": "same"}.get(speed.word, "same, time open")
