"""Which row of a comparison to use: the leanest that does not cost time, and what lower precision brings on top."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from harness.contract.strategy import Strategy
from harness.records import Applied, Case
from harness.records.record import EXACT, LADDER, OUT_OF_MEMORY, WRONG
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row

T = TypeVar("T")
NEAR = 1.02
"""Peaks up to this many times the least are as good, so that the plainest of their strategies is named."""
CHEAP = 1.10
"""Rows whose time is surely below this are preferred, however lean the others are."""
STANDS_IN = "offloading"
"""The note of a row that moves nothing on this machine, and shows what would be moved on another."""


@dataclass(frozen=True)
class Choice:
    """The row to use and why: `fits` where the baseline ran out of memory, `inexact` with a lower precision on top.

    `row` is None where no strategy is known to answer as before in less memory, or in the budget.
    """

    row: Row | None
    inexact: Row | None
    baseline_fits: bool


def choice(table: Comparison, strategies: Mapping[str, Strategy]) -> Choice | None:
    """Choose among the rows of a comparison; None where nothing of it was measured, or its baseline ended otherwise.

    Others can be compared with a baseline that ran, or that ran out of memory. What is a default of one of `strategies`
    is no setting.
    """
    baseline = next((row for row in table.rows if row.case.is_baseline), None)
    if baseline is None or baseline.status not in ("ok", *OUT_OF_MEMORY):
        return None
    if not any(row.status == "ok" for row in table.rows):
        return None
    fits = baseline.status == "ok"
    rows = [row for row in table.rows if _usable(row) and not row.case.is_baseline and not row.case.is_control]
    lean = [row for row in rows if not fits or (row.memory == "less" and reaches_users(row))]
    exact = [row for row in lean if row.answer in EXACT]
    chosen = _best([row for row in exact if cheap(row)] or exact, strategies)
    limit = chosen.peak_bytes if chosen is not None else None
    rest = [row for row in lean if row.answer not in EXACT and (limit is None or (row.peak_bytes or 0) < 0.98 * limit)]
    return Choice(chosen, _best([row for row in rest if cheap(row)] or rest, strategies), fits)


def _usable(row: Row) -> bool:
    """Check whether a row was measured here, its answer is right, and nothing withholds its verdict."""
    right = row.status == "ok" and row.answer is not None and row.answer not in WRONG
    return right and row.verdict != "withheld" and not stands_in(row)


def stands_in(row: Row) -> bool:
    """Check whether a row shows what another machine would move, and moves nothing on this one."""
    return any(STANDS_IN in record.notes for record in row.records)


def reaches_users(row: Row) -> bool:
    """Check whether a row takes less than the baseline with the usual allocator as well, or that is not known."""
    return row.native_ratio is None or row.native_ratio < 1


def cheap(row: Row) -> bool:
    """Check whether a row surely costs little time."""
    interval = row.speed.inferred if row.speed is not None else None
    return interval is not None and interval.high < CHEAP


def _best(rows: Sequence[Row], strategies: Mapping[str, Strategy]) -> Row | None:
    """Return the leanest row, or of those as lean the one that comes first of those that `as_good` leaves."""
    least = min((row.peak_bytes or 0 for row in rows), default=0)
    near = as_good([row for row in rows if (row.peak_bytes or 0) <= NEAR * least], lambda row: row)
    return min(near, key=lambda row: (*preference(row, strategies), row.peak_bytes or 0), default=None)


def preference(row: Row, strategies: Mapping[str, Strategy]) -> tuple[float, ...]:
    """Order rows that take as much: the plainest first, then the one likely to be fastest, then the least of the host.

    One that was not timed comes after those that were.
    """
    return *plainness(row.case, strategies), inf if row.speed is None else row.speed.ratio, row.host_bytes or 0


def as_good(rows: Sequence[T], row_of: Callable[[T], Row]) -> list[T]:
    """Return those with the closest answer, without those that are surely slower than another of these."""
    closest = min((_distance(row_of(each)) for each in rows), default=0)
    close = [each for each in rows if _distance(row_of(each)) == closest]
    latest = min((_time_span(row_of(each)).high for each in close), default=inf)
    return [each for each in close if _time_span(row_of(each)).low <= latest]


def _distance(row: Row) -> int:
    """Return how far an answer is from the baseline's: 0 where it is exact, else its rung of the ladder."""
    if row.answer is None or row.answer in EXACT:
        return 0
    return LADDER.index(row.answer) if row.answer in LADDER else len(LADDER)


def _time_span(row: Row) -> Interval:
    """Return the interval of a row's ratio of times; all there are, where too few rounds were timed."""
    return (row.speed.inferred if row.speed is not None else None) or Interval(0.0, inf)


def plainness(case: Case, strategies: Mapping[str, Strategy] | None = None) -> tuple[int, int]:
    """Return how many strategies a case has, and how many settings of them; fewer are plainer.

    A setting that is the default of its strategy does not count, where `strategies` are known.
    """
    known = strategies or {}
    return len(case.strategies), sum(_settings(each, known.get(each.name)) for each in case.strategies)


def _settings(applied: Applied, strategy: Strategy | None) -> int:
    """Count the settings of a strategy that are not its defaults."""
    defaults = {name: knob.default for name, knob in strategy.knobs.items()} if strategy is not None else {}
    return sum(name not in defaults or defaults[name] != value for name, value in applied.knobs.items())
