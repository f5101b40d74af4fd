"""What was measured of each case: its records by kind, and the cases that are compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from harness.records import Case, Record, Slot
from harness.verdicts import rounds
from harness.verdicts.pooled import LONGEST_SECONDS, SHORTEST_SECONDS

DEVICE_BLOCK = 512
"""The unit of a device's allocator in bytes: its counters are exact to a block."""


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
        """How its memory measurement ended; "open" without one. With its children above the budget it ran out of it."""
        if not self.memory:
            return "open"
        status = next((record.status for record in self.memory if record.status != "ok"), "ok")
        over = self.children is not None and (self.own_peak or 0) + self.children[0] > (
            self.case.budget_bytes or math.inf
        )
        return "oom_budget" if status == "ok" and over else status

    @property
    def peaks(self) -> list[int]:
        """The peak of each repetition in bytes, of the host or the device, whichever the place is about."""
        return [peak for record in self.memory if (peak := record.peak_bytes) is not None]

    @property
    def own_peak(self) -> int | None:
        """The largest of the repetitions in bytes, of the process alone."""
        return max(self.peaks, default=None)

    @property
    def peak(self) -> int | None:
        """The largest of the repetitions in bytes, child processes included by their upper bound."""
        return None if self.own_peak is None else self.own_peak + (self.children[1] if self.children else 0)

    @property
    def span(self) -> tuple[int, int]:
        """The least and the largest that it may take in bytes: of its repetitions, with its child processes."""
        least, most = self.children or (0, 0)
        return min(self.peaks, default=0) + least, max(self.peaks, default=0) + most

    @property
    def usable(self) -> bool:
        """Whether it ended well and its peak is known."""
        return self.status == "ok" and self.peak is not None

    @property
    def children(self) -> tuple[int, int] | None:
        """What the child processes of a run took at least and at most, in bytes; None where it had none.

        The lower one is at most the upper, though it may have counted a child that still shared its worker's memory.
        """
        if self.case.place.device != "cpu":
            return None
        bounds = [
            (min(record.child_peak_bytes or 0, record.child_peak_bound_bytes), record.child_peak_bound_bytes)
            for record in self.memory
            if record.child_peak_bound_bytes
        ]
        return max(bounds, key=lambda each: each[1], default=None)

    @property
    def resolution(self) -> int:
        """The smallest difference in bytes that the meter resolves."""
        return resolution_of(self.case, self.memory)

    @property
    def timed(self) -> dict[tuple[int, int], Record]:
        """The time measurements that ended well, by round and block, but for those whose clock nobody can believe."""
        return {at: record for at, record in self.times.items() if step_time(record) is not None}

    @property
    def impossible(self) -> int:
        """How many processes ended well with step times that no step can take."""
        return sum(record.status == "ok" for record in self.times.values()) - len(self.timed)

    @property
    def seconds(self) -> dict[tuple[int, int], float]:
        """The step time of each process in seconds."""
        return {at: of_steps(record.times.step_seconds, record.times.uneven) for at, record in self.timed.items()}

    @property
    def natives(self) -> list[int]:
        """The host's peak of each timed process, its allocator as the system has it, in bytes; on a device none."""
        if self.case.place.device != "cpu":
            return []
        peaks = (record.times.native_peak_host_bytes for record in self.timed.values())
        return [peak for peak in peaks if peak is not None]


def resolution_of(case: Case, records: Iterable[Record]) -> int:
    """Return the smallest difference in bytes that the meter of a case resolves: that of the device or of the host."""
    if case.place.device != "cpu":
        return DEVICE_BLOCK
    return max((record.memory.resolution_bytes or 0 for record in records), default=0)


def step_time(record: Record) -> float | None:
    """Return the step time of a process in seconds.

    None where it did not end well, or where one of them is a time that no step can take: its clock jumped.
    """
    steps = record.times.step_seconds
    if record.status != "ok" or not steps or not all(map(possible, steps)):
        return None
    return of_steps(steps, record.times.uneven)


def of_steps(seconds: Sequence[float], uneven: bool = False) -> float:
    """Return the step time of a process: the mean of the faster half of its timed steps, the middle one included.

    What disturbs a step only makes it longer. Between processes this scatters less than the median does, and unlike the
    minimum it sees a cost that comes in most of the steps (`tests/benchmarks/clock_figures.py` compares them).

    Where batches are uneven, the faster steps are those of the smaller ones: there it is the mean of all.
    """
    return fmean(seconds if uneven else sorted(seconds)[: (len(seconds) + 1) // 2])


def possible(seconds: float) -> bool:
    """Check that a step can take a time: False for 0, for less, for months and for what is no number."""
    return SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS


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
        groups.setdefault(observed.case.comparison_key, []).append(observed)
    return [_of_newest_runs(group) for group in groups.values()]


def comparable(group: Sequence[Observed], planned: int) -> tuple[dict[str, dict[tuple[int, int], float]], int]:
    """Return the step times of a group in complete rounds, by row, round and block in seconds, and the rounds planned.

    Where the record does not say how many were planned, as many were as there are.
    """
    timed = [observed for observed in group if observed.times]
    times = {observed.case.label: observed.seconds for observed in timed}
    planned = max(planned, *(number + 1 for each in timed for number, _ in each.times), 0)
    left = rounds.left({observed.case.label: observed.times for observed in timed}, planned)
    failed = {
        observed.case.label: left.get(observed.case.label, set())
        | {number for number, block in observed.times if (number, block) not in observed.timed}
        for observed in timed
    }
    number, members = rounds.next_turn(list(times), times, failed, planned)
    complete = number if members else planned
    if not complete:
        return times, planned
    return rounds.before(times, complete), planned


def _of_newest_runs(group: Sequence[Observed]) -> list[Observed]:
    """Return a group without the times of rounds that a later run timed again."""
    times = {observed.case.digest(): observed.times for observed in group}
    runs = {case: {at: record.origin.run_id for at, record in each.items()} for case, each in times.items()}
    newest = rounds.newest(times, runs)
    return [replace(observed, times=newest[observed.case.digest()]) for observed in group]


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
    memory = tuple(record for record in by_kind["memory"] if not _is_withdrawn(record))
    return Observed(case, next(iter(by_kind["predict"]), None), answer, memory, times)


def _is_withdrawn(record: Record) -> bool:
    """Check whether a repetition of a measurement ended from outside: the first one stands without it."""
    return record.slot is not None and record.slot.repeat > 0 and record.status == "killed_unknown"
