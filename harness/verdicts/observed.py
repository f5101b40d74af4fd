"""What was measured of each case: its records by kind, and the cases that are compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.records import Case, Record, Slot


@dataclass(frozen=True)
class Observed:
    """The newest records of one case, by kind."""

    case: Case
    predict: Record | None
    answer: Record | None
    memory: tuple[Record, ...]
    times: Mapping[tuple[int, int], Record]
    """By round and block."""

    @property
    def status(self) -> str:
        """How its memory measurement ended; "open" without one."""
        return next((record.status for record in self.memory if record.status != "ok"), "ok") if self.memory else "open"

    @property
    def peaks(self) -> list[int]:
        """The peak of each repetition in bytes, of the host or the device, whichever the place is about."""
        on_device = self.case.place.device != "cpu"
        peaks = (
            record.memory.peak_device_bytes if on_device else record.memory.peak_host_bytes for record in self.memory
        )
        return [peak for peak in peaks if peak is not None]

    @property
    def peak(self) -> int | None:
        """The largest of the repetitions in bytes."""
        return max(self.peaks, default=None)

    @property
    def resolution(self) -> int:
        """The smallest difference in bytes that the meter resolves."""
        return max((record.memory.resolution_bytes or 0 for record in self.memory), default=0)

    @property
    def timed(self) -> dict[tuple[int, int], Record]:
        """The time measurements that ended well, by round and block."""
        return {at: record for at, record in self.times.items() if record.status == "ok" and record.times.step_seconds}

    @property
    def seconds(self) -> dict[tuple[int, int], float]:
        """The step time of each process: the median of its timed steps, in seconds."""
        return {at: median(record.times.step_seconds) for at, record in self.timed.items()}

    @property
    def natives(self) -> list[int]:
        """The peak of each timed process, whose allocator is as the system has it, in bytes."""
        peaks = (record.times.native_peak_host_bytes for record in self.timed.values())
        return [peak for peak in peaks if peak is not None]


def grouped(records: Iterable[Record]) -> list[list[Observed]]:
    """Return the cases that are compared, group by group, each in the order of the suite."""
    latest: dict[Slot, Record] = {}
    answers: dict[tuple[str, str], Record] = {}
    for record in records:
        if record.slot and record.case:
            latest[record.slot] = record
            if record.slot.kind == "numerics":  # groups share it, and may be of different machines
                answers[record.slot.case, machine_of(record)] = answers[record.slot.case, ""] = record
    by_case: dict[str, list[Record]] = {}
    for slot, record in latest.items():
        if slot.kind not in ("numerics", "pilot", "reference"):
            by_case.setdefault(slot.case, []).append(record)
    groups: dict[str, list[Observed]] = {}
    for members in sorted(by_case.values(), key=lambda members: members[0].position):
        observed = _observed(members, answers)
        groups.setdefault(observed.case.group, []).append(observed)
    return list(groups.values())


def machine_of(record: Record) -> str:
    """Return the name of the machine that a record is from."""
    return str(record.origin.machine.get("name", ""))


def _observed(records: Sequence[Record], answers: Mapping[tuple[str, str], Record]) -> Observed:
    """Put the records of a case beside each other; the answer is that of its own machine, where there is one."""
    by_kind: dict[str, list[Record]] = {"predict": [], "memory": [], "time": []}
    for record in records:
        if record.slot and record.slot.kind in by_kind:
            by_kind[record.slot.kind].append(record)
    probed = next((record for record in by_kind["memory"] if record.probe), None)
    answer = None
    if probed is not None and probed.probe is not None:
        answer = answers.get((probed.probe, machine_of(probed)), answers.get((probed.probe, "")))
    times = {(record.slot.round, record.slot.block): record for record in by_kind["time"] if record.slot}
    case = records[0].case
    assert case is not None
    return Observed(case, next(iter(by_kind["predict"]), None), answer, tuple(by_kind["memory"]), times)
