"""Which memory is measured again: of rows whose peak is so near to a bound that one run cannot say which side it is on.

Such are the bounds of `less` and `more`, and those of claims.
"""

from collections.abc import Iterable, Iterator, Sequence

from harness.records import Case, Claim, Record, Slot
from harness.run.schedule import Latest, Schedule
from harness.verdicts import claims
from harness.verdicts.judge import Comparison, judge

REPEATS = 3
"""How often the memory of a row is measured that is near a bound."""
DOUBT = 0.05
"""The share by which the peak of a row may be another next time: 310 of 316 rows that ran three times stayed in it."""
KINDS = ("predict", "memory")
"""What the nearness of a row is judged by."""


def slots_of(schedule: Schedule, cases: Iterable[Case], latest: Latest) -> Iterator[Slot]:
    """Yield the repetitions that cases want and do not have; none of a case that does not run."""
    for case in (schedule.digest(each) for each in cases):
        slots = [Slot(case=case, kind="memory", repeat=repeat) for repeat in range(1, REPEATS)]
        yield from (slot for slot in slots if schedule.wants(slot, latest.get(slot)))


def are_missing(schedule: Schedule, latest: Latest, records: Sequence[Record]) -> bool:
    """Check whether repetitions are missing, as in the results of a run that was stopped in the midst of them."""
    tables = judged(records)
    words = [case for table in tables for case in near_words(table)] if schedule.rounds else []
    near = {case.digest(): case for case in [*words, *near_claims(schedule.plan.suite.claims, tables)]}
    runs = (case for case in near.values() if not schedule.cannot_run(schedule.digest(case), latest))
    return any(slots_of(schedule, runs, latest))


def judged(records: Iterable[Record]) -> list[Comparison]:
    """Return the comparisons of some records, judged by their memory."""
    return judge(record for record in records if record.slot is not None and record.slot.kind in KINDS)


def near_words(table: Comparison) -> list[Case]:
    """Return the rows of a comparison near the bound of `less` or `more`, and its baseline with them."""
    baseline = table.rows[0]
    if baseline.peak_bytes is None:
        return []
    near = [
        row.case
        for row in table.rows
        if row.peak_bytes is not None
        and row.margin_bytes is not None
        and abs(abs(row.peak_bytes - baseline.peak_bytes) - row.margin_bytes) < row.margin_bytes / 2
    ]
    return [baseline.case, *near] if near else []


def near_claims(asked: Iterable[Claim], tables: Sequence[Comparison]) -> list[Case]:
    """Return the rows near the bound of a claim, of all comparisons that were measured."""
    return [row.case for row in claims.near(asked, tables, DOUBT)]
