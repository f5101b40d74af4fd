"""Step times of rows as claims hold them against each other: beside another row, or each by itself."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from harness.records import Record
from harness.verdicts import dunnett, looks, remarks
from harness.verdicts.expressions import WAITS, Figure, Open, Unknown, exact
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.observed import of_steps, possible, step_time
from harness.verdicts.pooled import BASELINES, DECIDED, ERROR, SHORTEST_SECONDS, pooled

LEAST_ROUNDS = 3
"""Rounds that a time by itself needs for an interval."""


def check(row: Row, field: str) -> None:
    """Raise Unknown for the waits of a row on a device, where a copy to it waits for the step before."""
    if field == "fetch_seconds" and row.case.place.device != "cpu":
        raise Unknown(f"{row.label}: the wait for a batch on a GPU is that for the step before: ask about it on a CPU")


def of_rows(table: Comparison, field: str) -> dict[str, dict[Any, float]]:
    """Return a time of each process of a comparison in seconds, by row, round and block, in the rounds that count.

    Of steps it is the step time, of anything else the median.
    """
    times: dict[str, dict[Any, float]] = {}
    for row in table.rows:
        for record in row.records:
            values = getattr(record.times, field)
            if _counts(record, table) and record.slot and step_time(record) is not None and values:
                uneven = record.times.uneven
                typical = of_steps(values, uneven) if field == "step_seconds" or uneven else median(values)
                seconds = max(typical, SHORTEST_SECONDS)  # a batch that is there already takes no time
                if possible(seconds):
                    times.setdefault(row.label, {})[record.slot.round, record.slot.block] = seconds
    return times


def _counts(record: Record, table: Comparison) -> bool:
    """Check whether a record is of a round that counts."""
    if record.slot is None or record.slot.kind != "time":
        return False
    return table.timed_rounds is None or record.slot.round < table.timed_rounds


def beside(row: Row, table: Comparison, field: str, error: float, anchor: str) -> Figure:
    """Return a time: that of the row labelled `anchor`, taken as exact, times the row's ratio to it.

    Rows of one table ran within seconds of each other, so that their ratio has less doubt than the time of either.
    Where the anchor is the baseline, the ratio of steps is that of the table, to the mean of all baselines. Waits of
    rows differ by orders of magnitude, and so does their scatter: they are compared by their own pairs alone.
    """
    times = of_rows(table, field)
    if row.label not in times:
        raise _untimed(row)
    anchored = next(each for each in table.rows if each.label == anchor)
    if anchor not in times:
        raise _untimed(anchored)
    of_all = anchor == BASELINES[0]
    shown = table.unit_seconds if of_all else anchored.step_seconds  # a claim shows no other than the table
    reference = exact((shown if field == "step_seconds" else None) or median(times[anchor].values()), "s")
    if row.label == anchor:
        return reference
    if field in WAITS:
        return _ratio(times[row.label], times[anchor], row.label, error) * reference
    speed = row.speed if of_all else pooled(times, (anchor,)).speeds.get(row.label)
    interval = speed.interval_at(_of_looks(times, row, table, error)) if speed is not None else None
    if speed is None or interval is None:
        raise Open(f"{row.label} was timed in {rounds(len(times[row.label]))} beside too few others")
    return Figure(interval.low, speed.ratio, interval.high) * reference


def _of_looks(times: Mapping[str, Mapping[Any, float]], row: Row, table: Comparison, error: float) -> float:
    """Return the error at which a row is to be judged so that it is `error` over all looks that were taken at it.

    A row that left, or is decided and so ended the rounds, had a look's share of it; for any other what the looks
    before the last one left of it.
    """
    if table.rounds < 2:
        return error
    planned = looks.planned(table.rounds)
    made, own = (1 + max(at[0] for each in rows for at in each) for rows in (times.values(), [times[row.label]]))
    stopped = own < made or (row.speed is not None and row.speed.word in DECIDED)
    share = looks.nominal_error(planned) if stopped else looks.last_error(planned, made)
    return error * share / ERROR


def by_itself(row: Row, table: Comparison, field: str, error: float) -> Figure:
    """Return a time by itself, by the scatter of its rounds, which differ by the machine's drift as well.

    Of too few rounds it is the time of the baseline, which has more, times the row's ratio to it.
    """
    times = of_rows(table, field)
    if row.label not in times:
        raise _untimed(row)
    own = _by_round(times[row.label])
    enough = len(own) >= LEAST_ROUNDS or BASELINES[0] not in times
    label = row.label if enough else BASELINES[0]
    logs = own if enough else _by_round(times[label])
    if len(logs) < LEAST_ROUNDS:
        raise Open(f"{label} was timed in {rounds(len(logs))}, and times apart need {LEAST_ROUNDS}")
    if enough:
        return _of_mean(logs, error, "s")
    ratio = beside(row, table, field, error / 2, label) / exact(median(times[label].values()), "s")
    return _of_mean(logs, error / 2, "s") * ratio  # each may miss half as often


def _by_round(times: Mapping[Any, float]) -> list[float]:
    """Return the logarithm of each round's time: processes of one round are neighbours, and no rounds of their own."""
    logs: dict[int, list[float]] = {}
    for (number, _), seconds in times.items():
        logs.setdefault(number, []).append(math.log(seconds))
    return list(map(fmean, logs.values()))


def _ratio(own: Mapping[Any, float], others: Mapping[Any, float], label: str, error: float) -> Figure:
    """Return the ratio of one row to another by the rounds of both, in one block where they met."""
    of_round = {number: seconds for (number, _), seconds in others.items()}
    logs = [math.log(seconds / others.get(at, of_round[at[0]])) for at, seconds in own.items() if at[0] in of_round]
    if len(logs) < LEAST_ROUNDS:
        raise Open(f"{label} was timed in {rounds(len(logs))} beside the other, and {LEAST_ROUNDS} are needed")
    return _of_mean(logs, error)


def _of_mean(logs: Sequence[float], error: float, unit: str = "") -> Figure:
    """Return the geometric mean of what these are logarithms of, with the interval of Student's t."""
    width = dunnett.quantile(1, 0.0, len(logs) - 1, error) * stdev(logs) / math.sqrt(len(logs))
    middle = sum(logs) / len(logs)
    return Figure(math.exp(middle - width), math.exp(middle), math.exp(middle + width), unit)


def _untimed(row: Row) -> Unknown:
    timed = any(step_time(record) is not None for record in row.records)
    if not timed and (why := remarks.unfinished(row.records)):
        return Unknown(f"{row.label} was not timed: {why}")
    return Unknown(f"{row.label} was not timed" + (f" ({row.reasons[0]})" if row.reasons else ""))


def rounds(count: int) -> str:
    """Return a number of rounds in words: `1 round`, `2 rounds`."""
    return f"{count} round{'' if count == 1 else 's'}"
