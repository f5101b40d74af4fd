"""From records to verdicts: what each strategy costs, what it saves, whether the answer is still right."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from harness.records import Case, Record, Slot, roofline
from harness.records.case import CONTROL, VERDICT_ROUNDS
from harness.verdicts import effects as statistics

MIB = 1 << 20
MEMORY_MARGIN = 0.01
UNSTABLE = 0.01
LEAK_STEPS = 5
"""Steps of a run from which on growth is called so: in fewer, an allocator may still settle."""
SETTLING = 0.05
"""The share of its peak by which a baseline may grow with each step."""
PREDICTION_OFF = 0.10
LOSS_MARGIN = 1e-4
"""How far the losses of the measured run may lie from the baseline's when the answer is to be the same."""

WITHHELD = {
    "unstable", "unsettled", "no_reset", "native_regime", "lower_bound", "child_processes", "control_failed",
}  # fmt: skip
WRONG = {"diverged", "invalid"}


@dataclass(frozen=True)
class Row:
    """One case with everything that was found out about it; None where nothing was, and why in `reasons`."""

    case: Case
    status: str
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    peak_phase: str | None = None
    predicted_bytes: int | None = None
    residual_ratio: float | None = None
    floor_bytes: int | None = None
    floor_ratio: float | None = None
    step_median_seconds: float | None = None
    effect: statistics.Effect | None = None
    memory: str | None = None
    speed: str | None = None
    answer: str | None = None
    answer_reason: str = ""
    loss_difference: float | None = None
    verdict: str = ""
    predicted_phase: str | None = None
    predicted_time_ratio: float | None = None
    fetch_median_seconds: float | None = None
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    records: tuple[Record, ...] = field(default=(), repr=False)
    prediction: Record | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return self.case.label

    @property
    def ranked(self) -> bool:
        """Whether the row may be ranked: measured, right, and not withheld by a flag."""
        right = self.answer is not None and self.answer not in WRONG
        return self.status == "ok" and right and not WITHHELD & set(self.flags)


@dataclass(frozen=True)
class Table:
    """The rows of one comparison, the baseline first, and what is to be said about all of them."""

    case: Case
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines on which peaks and times of it were measured."""
        kept = (record for row in self.rows for record in row.records if record.status == "ok")
        measured = (_machine(record) for record in kept if record.slot and record.slot.kind != "numerics")
        return tuple(dict.fromkeys(name for name in measured if name))


def judge(found: Iterable[Record]) -> list[Table]:
    """Group records by what they are compared to, and judge each group against its baseline."""
    latest: dict[Slot, Record] = {}
    answers: dict[tuple[str, str], Record] = {}
    for record in found:
        if record.slot and record.case:
            latest[record.slot] = record
            if record.slot.kind == "numerics":  # groups share it, and may be of different machines
                answers[record.slot.case, _machine(record)] = answers[record.slot.case, ""] = record
    by_case: dict[str, list[Record]] = {}
    for slot, record in latest.items():
        if slot.kind not in ("numerics", "pilot", "reference"):
            by_case.setdefault(slot.case, []).append(record)
    groups: dict[str, list[_Seen]] = {}
    for members in sorted(by_case.values(), key=lambda members: members[0].position):
        seen = _seen(members, answers)
        groups.setdefault(seen.case.group, []).append(seen)
    return [_judged(group) for group in groups.values()]


def searched(found: Iterable[Record]) -> list[Table]:
    """Group the limits that `harness fit` found by what they are compared to, the budget included; judge nothing."""
    groups: dict[str, list[Row]] = {}
    for record in found:
        if record.case is not None and record.fit is not None:
            row = Row(
                record.case, "searched", reasons=(record.fit.reason,) * bool(record.fit.reason), records=(record,)
            )
            groups.setdefault(record.case.group, []).append(row)
    return [Table(rows[0].case, tuple(rows)) for rows in groups.values()]


@dataclass(frozen=True)
class _Seen:
    """The records of one case, by kind."""

    case: Case
    predict: Record | None
    answer: Record | None
    memory: tuple[Record, ...]
    times: dict[int, Record]

    @property
    def peaks(self) -> list[int]:
        """The headline of the place, from each repeat."""
        on_device = self.case.place.device != "cpu"
        found = [record.peak_device_bytes if on_device else record.peak_host_bytes for record in self.memory]
        return [peak for peak in found if peak is not None]

    @property
    def peak(self) -> int | None:
        """The largest of the repeats."""
        return max(self.peaks, default=None)

    @property
    def status(self) -> str:
        return next((record.status for record in self.memory if record.status != "ok"), "ok") if self.memory else "open"

    def medians(self) -> dict[int, float]:
        """The median step of each round in seconds."""
        return {
            number: median(r.step_seconds) for number, r in self.times.items() if r.status == "ok" and r.step_seconds
        }


def _machine(record: Record) -> str:
    return str(record.machine.get("name", ""))


def _seen(members: Sequence[Record], answers: Mapping[tuple[str, str], Record]) -> _Seen:
    """Put the records of a case beside each other; the answer is that of its own machine, where there is one."""
    memory = [record for record in members if record.slot and record.slot.kind == "memory"]
    probed = next((record for record in memory if record.probe), None)
    probe = probed.probe if probed is not None else None
    case = members[0].case
    assert case is not None
    return _Seen(
        case,
        next((record for record in members if record.slot and record.slot.kind == "predict"), None),
        answers.get((probe, _machine(probed)), answers.get((probe, ""))) if probed and probe else None,
        tuple(memory),
        {record.slot.round: record for record in members if record.slot and record.slot.kind == "time"},
    )


def _judged(group: list[_Seen]) -> Table:
    baseline = next((seen for seen in group if not seen.case.strategies), None)
    control = next((s for s in group if [a.name for a in s.case.strategies] == [CONTROL]), None)
    notes = _mixed(group)
    control_effect = _effect(control, baseline)
    effects = [effect for seen in group if (effect := _effect(seen, baseline)) is not None]
    uncontrolled = control_effect is None and any(effect.rounds >= VERDICT_ROUNDS for effect in effects)
    speed_held = uncontrolled or (control_effect is not None and not statistics.control_clean(control_effect))
    if uncontrolled:
        notes.append("The control `nothing` was not timed here, so there are no speed verdicts.")
    elif speed_held:
        notes.append("The control `nothing` did not come out equal in time, so speed verdicts are withheld.")
    margin = statistics.group_margin(control_effect) if control_effect is not None else statistics.MARGIN
    memory_held = control is not None and _memory(control, baseline) in ("less", "more")
    if memory_held:
        notes.append("The control `nothing` did not come out equal in memory, so memory verdicts are withheld.")
    rows = tuple(_row(seen, baseline, margin, speed_held, memory_held) for seen in group)
    return Table(group[0].case, rows, tuple(notes))


def _mixed(group: list[_Seen]) -> list[str]:
    """Warn where figures were taken in different ways, since those never compare."""
    memory = [record for seen in group for record in seen.memory if record.status == "ok"]
    notes = []
    if len({record.regime for record in memory}) > 1:
        notes.append("Peaks were taken under different allocator regimes and do not compare.")
    times = [record for seen in group for record in seen.times.values() if record.status == "ok"]
    if len({_machine(record) for record in (*memory, *times)}) > 1:
        notes.append("Records of different machines are mixed here and do not compare.")
    return notes


def _effect(seen: _Seen | None, baseline: _Seen | None) -> statistics.Effect | None:
    """Pair the rounds that both have; rounds of different machines never pair."""
    if seen is None or baseline is None or seen is baseline:
        return None
    own, other = seen.medians(), baseline.medians()
    rounds = sorted(own.keys() & other.keys())
    return statistics.effect([own[r] for r in rounds], [other[r] for r in rounds]) if rounds else None


def _memory(seen: _Seen, baseline: _Seen | None) -> str | None:
    """Compare peaks: a difference counts beyond the meter's resolution and 1 % of the baseline's."""
    if baseline is None or seen.status != "ok" or baseline.status != "ok" or seen.peak is None or baseline.peak is None:
        return None
    resolution = max((record.resolution_bytes or 0 for record in seen.memory), default=0)
    difference = seen.peak - baseline.peak
    if abs(difference) <= max(resolution, MEMORY_MARGIN * baseline.peak):
        return "same"
    return "less" if difference < 0 else "more"


def _row(seen: _Seen, baseline: _Seen | None, margin: float, speed_held: bool, memory_held: bool) -> Row:
    case, peak = seen.case, seen.peak
    predicted = seen.predict.predicted_peak_bytes if seen.predict else None
    floor = seen.predict.floor_bytes if seen.predict else None
    medians = list(seen.medians().values())
    effect = _effect(seen, baseline)
    speed = None if effect is None or speed_held else statistics.speed_verdict(effect, margin)
    rounds = 0 if effect is None else effect.rounds
    memory = None if memory_held or not case.strategies else _memory(seen, baseline)
    answer, answer_reason, difference = _answer(seen, baseline)
    ok = seen.status == "ok"
    other = baseline.peak if baseline is not None and baseline.status == "ok" else None
    first = seen.memory[0] if seen.memory else None
    growth = _growth(seen, baseline)
    return Row(
        case=case,
        status=seen.status,
        peak_bytes=peak,
        peak_ratio=peak / other if ok and peak and other else None,
        peak_phase=first.peak_phase if first else None,
        predicted_bytes=predicted,
        predicted_phase=seen.predict.predicted_phase if seen.predict else None,
        predicted_time_ratio=_predicted_time(seen, baseline),
        residual_ratio=(peak - predicted) / predicted if ok and peak and predicted else None,
        floor_bytes=floor,
        floor_ratio=peak / floor if ok and peak and floor else None,
        step_median_seconds=median(medians) if medians else None,
        fetch_median_seconds=_fetch(seen),
        effect=effect,
        memory=memory,
        speed=speed,
        answer=answer,
        answer_reason=answer_reason,
        loss_difference=difference,
        verdict=_verdict(seen, baseline, memory, speed if rounds >= VERDICT_ROUNDS else None, answer),
        flags=(
            *_flags(seen, peak, predicted),
            *(("growing",) if growth else ()),
            *(("control_failed",) if memory_held else ()),
        ),
        notes=(*_notes(seen), *((f"it grew by {growth / MIB:,.1f} MiB with each step",) if growth else ())),
        reasons=_reasons(seen),
        records=(*seen.memory, *seen.times.values(), *([seen.answer] if seen.answer else [])),
        prediction=seen.predict,
    )


def _predicted_time(seen: _Seen, baseline: _Seen | None) -> float | None:
    """Give the ratio of step times that the counted work and the machine's rates lead to expect."""
    if baseline is None or seen is baseline:
        return None
    own, other = (_seconds(each.predict) for each in (seen, baseline))
    return own / other if own and other else None


def _seconds(predicted: Record | None) -> float | None:
    known = roofline.Rates.read(predicted.machine.get("rates")) if predicted is not None else None
    return None if known is None or predicted is None else roofline.seconds(predicted.predicted_work, known)


def _fetch(seen: _Seen) -> float | None:
    """Give the median wait for a batch, over all rounds."""
    waits = [wait for record in seen.times.values() if record.status == "ok" for wait in record.fetch_seconds]
    return median(waits) if waits else None


def _notes(seen: _Seen) -> tuple[str, ...]:
    """Collect what the parts noted, in words: choices they made, numbers they gave, file pages among the peak."""
    if not seen.memory:
        return ()
    record = seen.memory[0]
    noted = {**(seen.predict.notes if seen.predict else {}), **record.notes}
    told = [f"{name.replace('_', ' ')}: {note}" for name, note in noted.items()]
    told += [f"{name.replace('_', ' ')} {_number(value)}" for name, value in record.extra.items() if _is_number(value)]
    pages = max((phase.file_bytes or 0 for phase in record.phases), default=0)
    if "file_backed" in record.flags:
        told.append(f"{pages / MIB:,.0f} MiB are pages of a file, which the kernel can take back")
    if record.all_ranks_bytes and seen.case is not None:
        held = [rank.peak_bytes / MIB for rank in record.ranks if rank.peak_bytes is not None]
        each = f"{min(held):,.1f} to {max(held):,.1f} MiB" if held else "in one process that was measured whole"
        told.append(f"each of {seen.case.ranks} ranks holds {each}, together {record.all_ranks_bytes / MIB:,.0f} MiB")
    if record.child_peak_bound_bytes:
        low, high = (record.child_peak_bytes or 0) / MIB, record.child_peak_bound_bytes / MIB
        told.append(f"its child processes take {low:,.0f} to {high:,.0f} MiB more")
    return tuple(told)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _answer(seen: _Seen, baseline: _Seen | None) -> tuple[str | None, str, float | None]:
    """Join the rung of the ladder with what the measured run itself showed: its losses and its batches."""
    verdict = seen.answer.answer if seen.answer else None
    rung, reason = (verdict.verdict, verdict.reason) if verdict else (None, "")
    if seen.answer is not None and seen.answer.status != "ok":
        reason = str(seen.answer.evidence.get("message", seen.answer.status))
    if baseline is None or seen.status != "ok" or baseline.status != "ok" or not (seen.memory and baseline.memory):
        return rung, reason, None
    own, other = seen.memory[0], baseline.memory[0]
    difference = max((abs(a - b) / abs(b) for a, b in zip(own.losses, other.losses, strict=False) if b), default=None)
    if own.feeds == "same" and own.batches_digest != other.batches_digest:
        return "invalid", "it trained on other batches than the baseline", difference
    exact = rung in ("bit_exact", "reassociated")
    if exact and own.feeds == "other":
        return "approximate", "it was fed other batches than the baseline", difference
    if exact and difference is not None and difference > LOSS_MARGIN:
        return "diverged", f"losses of the measured run differ by {difference:.1e}", difference
    return rung, reason, difference


def _verdict(seen: _Seen, baseline: _Seen | None, memory: str | None, speed: str | None, answer: str | None) -> str:
    """Name the trade: wins, trades, same, loses; enables where the baseline does not fit; fails.

    Without a speed verdict, or with too few rounds for one, only the memory is named: saves, same, costs.
    """
    if seen.status in ("unsupported", "open"):
        return "untested"
    if seen.status == "skipped_guard":
        return "skipped"
    if seen.status != "ok":
        return "fails"
    if answer in WRONG:
        return "wrong"
    if not seen.case.strategies:
        return "baseline"
    if baseline is not None and baseline.status in ("oom_budget", "oom_host", "oom_device"):
        return "enables"
    if memory is None or answer is None:
        return "withheld"
    if speed is None:
        return {"less": "saves", "same": "same", "more": "costs"}[memory]
    if memory == "same":
        return {"faster": "wins", "slower": "loses"}.get(speed, "same")
    if memory == "less":
        return "trades" if speed == "slower" else "wins"
    return "trades" if speed == "faster" else "loses"


def _flags(seen: _Seen, peak: int | None, predicted: int | None) -> tuple[str, ...]:
    flags = {flag: None for record in (*seen.memory, *seen.times.values()) for flag in record.flags}
    peaks = seen.peaks
    resolution = max((record.resolution_bytes or 0 for record in seen.memory), default=0)
    if len(peaks) > 1 and max(peaks) - min(peaks) > max(resolution, UNSTABLE * max(peaks)):
        flags["unstable"] = None
    if seen.status == "ok" and peak and predicted and abs(peak - predicted) > PREDICTION_OFF * predicted:
        flags["prediction_off"] = None
    return tuple(flags)


def _growth(seen: _Seen, baseline: _Seen | None) -> float | None:
    """Give by how much the memory of a run grew with each step, where that is more than the baseline's did: a leak.

    What settles slowly over the few steps of a run grows in the baseline as well, which has nothing to be held
    against and must grow by more; pages of a file are the kernel's to take back.
    """
    record = seen.memory[0] if seen.memory else None
    if record is None or record.slope_bytes_per_step is None or "file_backed" in record.flags:
        return None
    if len(record.losses) < LEAK_STEPS:
        return None
    other = baseline.memory[0] if baseline is not None and seen is not baseline and baseline.memory else None
    settling = max(0.0, other.slope_bytes_per_step or 0.0) if other is not None else 0.0
    more = record.slope_bytes_per_step - settling
    margin = MEMORY_MARGIN if other is not None else SETTLING
    least = max(record.resolution_bytes or 0, margin * (record.peak_host_bytes or 0))
    return record.slope_bytes_per_step if more > least else None


def _failure(record: Record) -> str:
    """Say in a few words why a run ended: what was asked for and where, or the message of the error."""
    evidence, where = record.evidence, record.evidence.get("phase")
    if record.status.startswith("oom") and _is_number(evidence.get("request_bytes")):
        told = f"asked for {evidence['request_bytes'] / MIB:,.0f} MiB more"
    else:
        told = str(evidence.get("message", record.status))
    return f"{told} in {where}" if where else told


def _reasons(seen: _Seen) -> tuple[str, ...]:
    told = [_failure(record) for record in seen.memory if record.status != "ok"]
    if seen.status != "unsupported" and seen.predict is not None and "predicted_peak_bytes" in seen.predict.missing:
        told.append(f"no prediction: {seen.predict.missing['predicted_peak_bytes']}")
    return tuple(dict.fromkeys(told))
