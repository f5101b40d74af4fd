"""How rows changed over commits: the peak and time of each in every run that is kept, and where they stepped.

A step is a change that noise does not make, from the run before that has the figure. A peak steps by more than the
meters' resolution and 1 %, beyond what repetitions of either run showed; one that cannot be relied on makes no step. A
time is compared as a multiple of its own run's baselines, so that faster days of a machine are none; it steps where the
interval of the ratio of both excludes 1 at an error of 1 in 1,000, and the ratio is more than 5 %.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.records import Case, Record
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import CHANGE_ERROR, Speed

PEAK_STEP = 0.01
TIME_STEP = 0.05
UNDECIDED = ("killed_unknown", "skipped_guard")
"""Statuses that tell of the machine in that hour, and nothing of the row."""


@dataclass(frozen=True)
class Point:
    """A row in one run: its commit and hour, its time as a multiple of its baselines', and its peak in bytes.

    What it had taken when it failed is no peak. `least_bytes` is the least that the peak may be, by its repetitions and
    child processes; `sure` is False where the peak cannot be relied on.
    """

    commit: str
    utc: str
    status: str
    peak_bytes: int | None
    resolution: int
    speed: Speed | None
    least_bytes: int | None = None
    sure: bool = True


@dataclass(frozen=True)
class Step:
    """A figure of a row that changed between two runs: `peak`, `time` or `status`; the ratio is after over before."""

    figure: str
    before: Point
    after: Point
    ratio: float | None

    @property
    def worse(self) -> bool:
        """Whether it takes more than before, or runs no longer."""
        return self.after.status != "ok" if self.ratio is None else self.ratio > 1


@dataclass(frozen=True)
class Series:
    """A row over all runs, in the order in which they were begun, on one machine, and where it stepped."""

    suite: str
    machine: str
    case: Case
    points: tuple[Point, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Run:
    """One results file, judged."""

    suite: str
    records: Sequence[Record]
    tables: Sequence[Comparison]


def series(runs: Iterable[Run]) -> list[Series]:
    """Follow every row through the runs that measured it, given in the order in which they were begun.

    Machines are never mixed.
    """
    points: dict[tuple[str, str, str], list[Point]] = {}
    cases: dict[tuple[str, str, str], Case] = {}
    for run in runs:
        origin = next((record.origin for record in run.records if record.origin.commit), None)
        if origin is None:
            continue
        for row in (row for table in run.tables for row in table.rows):
            if row.status != "open":  # what an interrupted run has not come to is no point of it
                key = run.suite, row.machine or str(origin.machine.get("name", "")), row.case.digest()
                points.setdefault(key, []).append(_point(row, origin.commit, origin.utc))
                cases[key] = row.case
    return [
        Series(suite, machine, cases[suite, machine, digest], tuple(each), tuple(steps(each)))
        for (suite, machine, digest), each in points.items()
    ]


def steps(points: Sequence[Point]) -> list[Step]:
    """Return where a figure differs by more than noise from that of the run before which has one."""
    ran = [point for point in points if point.status == "ok" and point.peak_bytes and point.sure]
    timed = [point for point in points if point.speed is not None and point.speed.inferred is not None]
    decided = [point for point in points if point.status not in UNDECIDED]
    return [
        *(
            Step("status", before, after, None)
            for before, after in itertools.pairwise(decided)
            if before.status != after.status and "ok" in (before.status, after.status)
        ),
        *(
            Step("peak", before, after, ratio)
            for before, after in itertools.pairwise(ran)
            if (ratio := peak_step(before, after)) is not None
        ),
        *(
            Step("time", before, after, ratio)
            for before, after in itertools.pairwise(timed)
            if (ratio := time_step(before, after)) is not None
        ),
    ]


def peak_step(before: Point, after: Point) -> float | None:
    """Return the ratio of two peaks where it is a step, else None."""
    if not before.peak_bytes or not after.peak_bytes or {before.status, after.status} != {"ok"}:
        return None
    least = max(before.resolution, after.resolution, PEAK_STEP * before.peak_bytes)
    more = (after.least_bytes or after.peak_bytes) - before.peak_bytes
    less = (before.least_bytes or before.peak_bytes) - after.peak_bytes
    return after.peak_bytes / before.peak_bytes if max(more, less) > least else None


def time_step(before: Point, after: Point) -> float | None:
    """Return the ratio of two times where it is a step, else None."""
    if before.speed is None or after.speed is None:
        return None
    ratio, interval = after.speed.ratio / before.speed.ratio, after.speed.change_since(before.speed, CHANGE_ERROR)
    stepped = interval is not None and 1 not in interval and abs(math.log(ratio)) > math.log1p(TIME_STEP)
    return ratio if stepped else None


def _point(row: Row, commit: str, utc: str) -> Point:
    least = row.span_bytes[0] if row.span_bytes else None
    return Point(commit, utc, row.status, row.whole_peak_bytes, row.resolution, row.speed, least, not row.doubts)
