"""Compare two runs of the same cases: what became better or worse, what stayed, and what is unresolved."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.records import Case, Record
from harness.records.record import LADDER, WRONG
from harness.refusal import Refusal
from harness.suite.units import shown
from harness.verdicts.interval import Interval
from harness.verdicts.judge import MEMORY_MARGIN, Comparison, Row
from harness.verdicts.observed import step_time
from harness.verdicts.pooled import CHANGE_ERROR, MARGIN, word_of

CONDITION = re.compile(r"(?:(peak|time)\s*>\s*(\d+(?:\.\d+)?)\s*%)|(answer|status|missing)")
LEAST_PROCESSES = 3
"""Processes that a time of the baseline needs in each run to be called the same: one scatters by 5 %."""
Key = tuple[str, str, str]
"""What a row is of: the suite, the machine and the case, by its digest."""
BETTER, WORSE, SAME, UNRESOLVED, NEW = "better", "worse", "same", "unresolved", "new"
UNMEASURED = "not measured"
"""The verdict on a time of a suite of which the new run timed nothing, as with `--rounds 0`."""
OF_WORD = {"faster": BETTER, "slower": WORSE, "within 5 %": SAME}
"""The verdict on a change of time, by the word that the clock has for its interval."""


class ConditionError(Refusal):
    """A condition that cannot be read, in one sentence."""


@dataclass(frozen=True)
class Change:
    """One figure of one case before and after; `ratio` is after over before, None where it is not a number,
    and `interval` where it lies, where that was inferred.

    `figure` is peak (bytes), time, answer, status, missing, or row for a case that the old run lacks; `verdict` better,
    worse, same, unresolved, not measured, or new for that. A time is a multiple of its own run's baselines, of these
    themselves the seconds of a step, with its unit.
    `suite` and `machine` are those of the new run, where it has the case or others of that machine.
    """

    case: Case
    figure: str
    before: int | str | None
    after: int | str | None
    verdict: str
    ratio: float | None = None
    reason: str = ""
    suite: str = ""
    machine: str = ""
    interval: Interval | None = None

    @property
    def of_both(self) -> bool:
        """Whether both runs have the case."""
        return self.figure not in ("missing", "row")

    @property
    def how(self) -> str:
        """What the figure was and is, by what factor it changed, or why it is not there."""
        more = f"{self.ratio:.3f} x" if self.ratio is not None else self.reason
        return f"{self._said(self.before)} before, {self._said(self.after)} now{f' ({more})' if more else ''}"

    def _said(self, value: int | str | None) -> str:
        """Write a figure with its unit."""
        return shown(value) if isinstance(value, int) else value or "unknown"


@dataclass(frozen=True)
class Condition:
    """What makes a comparison fail: a figure that became worse, beyond the noise and by more than a share."""

    figure: str
    above: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read `peak>5%`, `time>10%`, `answer`, `status` or `missing`; raise ConditionError for anything else."""
        match = CONDITION.fullmatch(text.strip())
        if match is None:
            raise ConditionError(
                f"there is no condition '{text[:40]}': use peak>5%, time>10%, answer, status or missing"
            )
        figure, share, word = match.groups()
        return cls(word or figure, float(share) / 100 if share else 0.0)

    def met(self, change: Change) -> bool:
        """Return whether a change is one of those to fail on; what nobody measured passes for nothing."""
        if change.figure != self.figure or change.verdict not in (WORSE, UNMEASURED):
            return False
        return change.ratio is None or change.ratio > 1 + self.above


def compare(before: Sequence[Comparison], after: Sequence[Comparison]) -> list[Change]:
    """Pair the rows of two runs and judge each figure; cases of one run alone are changes as well.

    Rows are paired by suite, machine and case; what is left by suite and case, the newest of each run, then by case,
    where each run has one. A case is missing where the new run has its suite, and it on no machine; see `of_suites`.
    """
    old, new = _rows(before), _rows(after)
    pairs = _pairs(_hours(old), _hours(new))
    partners = set(pairs.values())
    covered, known = set(map(_without_machine, pairs)), set(map(_without_machine, partners))
    moved = {key[:2]: other[:2] for key, other in pairs.items()}
    there = _suites(new) | {suite for suite, _, _ in pairs}
    timed = _suites(key for key, row in new.items() if _seconds(row))
    changes: list[Change] = []
    for key, row in old.items():
        suite, machine, case = key
        if key in pairs:
            changes += _placed(_of_case(row, new[pairs[key]], pairs[key][0] in timed), pairs[key][:2])
        elif suite in there and (suite, case) not in covered:
            lost = Change(row.case, "missing", row.status, None, WORSE, reason="the new run does not have it")
            changes += _placed([lost], moved.get((suite, machine), (suite, machine)))
    for key, row in new.items():
        if key not in partners and _without_machine(key) not in known:
            changes += _placed([_gained(row)], key[:2])
    return changes


def _placed(changes: Iterable[Change], where: tuple[str, str]) -> list[Change]:
    """Return changes with their suite and machine."""
    suite, machine = where
    return [replace(change, suite=suite, machine=machine) for change in changes]


def of_suites(before: Sequence[Comparison], after: Sequence[Comparison]) -> list[str]:
    """Return in sentences which suites the new run has nothing of, and which are compared with one of another name."""
    old, new = _rows(before), _rows(after)
    pairs = _pairs(_hours(old), _hours(new))
    suites = sorted(filter(None, _suites(old) - _suites(new) - _suites(pairs)))
    without = [f"The new run has no results of {', '.join(suites)}: nothing is said of them."] if suites else []
    others = sorted({(key[0], partner[0]) for key, partner in pairs.items() if key[0] != partner[0]})
    return without + [
        f"Rows of {one} are compared with those of {other}: their cases are equal." for one, other in others
    ]


def differences(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """Return sentences on what else differs between two runs: machines, regimes, versions."""
    old, new = _conditions(before), _conditions(after)
    return [
        f"{sentence}: {_listed(old.get(sentence))} before, {_listed(new.get(sentence))} after."
        for sentence in dict.fromkeys([*old, *new])
        if old.get(sentence) != new.get(sentence)
    ]


def _conditions(records: Sequence[Record]) -> dict[str, set[str]]:
    """Return what decides figures besides the code, under the sentence that says that it differs."""
    conditions: dict[str, set[str]] = {}
    for record in records:
        machine = record.origin.machine
        values = {
            "The machine differs": machine.get("name"),
            "The processor differs": machine.get("cpu"),
            "The GPU differs": machine.get("gpu"),
            "The libc differs": machine.get("libc"),
            "The memory was measured in other regimes": record.memory.regime,
            **{f"The version of {name} differs": version for name, version in record.origin.versions.items()},
        }
        for sentence, value in values.items():
            if value is not None:
                conditions.setdefault(sentence, set()).add(str(value))
    return conditions


def _listed(values: set[str] | None) -> str:
    return ", ".join(sorted(values or ())) or "unknown"


def _rows(tables: Sequence[Comparison]) -> dict[Key, Row]:
    """Return the rows of a run by suite, machine and case; of equal ones the last."""
    return {_key(row): row for table in tables for row in table.rows}


def _suites(keys: Iterable[Key]) -> set[str]:
    return {suite for suite, _, _ in keys}


def _key(row: Row) -> Key:
    records = [*row.records, *([row.prediction] if row.prediction is not None else [])]
    suite = next((record.origin.suite for record in records if record.origin.suite), "")
    return suite, row.machine, row.case.digest()


def _written(row: Row) -> str:
    """Return when the newest record of a row was written, UTC."""
    records = [*row.records, *([row.prediction] if row.prediction is not None else [])]
    return max((record.origin.utc for record in records), default="")


def _hours(rows: Mapping[Key, Row]) -> dict[Key, str]:
    """Return when each row was written."""
    return {key: _written(row) for key, row in rows.items()}


def _pairs(old: Mapping[Key, str], new: Mapping[Key, str]) -> dict[Key, Key]:
    """Return for each key of an old row that of the new one to compare it with; both say when each was written."""
    pairs = {key: key for key in old if key in new}
    for same in (_without_machine, lambda key: key[2]):
        lone = _alone(_newest(old, pairs), same)
        others = _alone(_newest(new, set(pairs.values())), same)
        pairs |= {lone[each]: others[each] for each in lone.keys() & others.keys()}
    return pairs


def _newest(hours: Mapping[Key, str], taken: Collection[Key]) -> Collection[Key]:
    """Return of those that are not taken the newest of each suite and case."""
    left = sorted((key for key in hours if key not in taken), key=lambda key: hours[key])
    return {_without_machine(key): key for key in left}.values()


def _without_machine(key: Key) -> tuple[str, str]:
    return key[0], key[2]


def _alone(keys: Collection[Key], same: Callable[[Key], object]) -> dict[object, Key]:
    """Return the keys that no other is the same as."""
    counts = Counter(map(same, keys))
    return {same(key): key for key in keys if counts[same(key)] == 1}


def _of_case(old: Row, new: Row, timed: bool) -> Iterator[Change]:
    """Yield the changes of a row; `timed` says whether the new run timed anything of its suite."""
    if old.status != new.status:
        verdict = WORSE if old.status == "ok" else BETTER if new.status == "ok" else UNRESOLVED
        yield Change(old.case, "status", old.status, new.status, verdict, reason=next(iter(new.reasons), ""))
    if old.answer is not None and new.answer is not None:
        yield Change(old.case, "answer", old.answer, new.answer, _of_answers(old.answer, new.answer))
    elif old.answer is not None:
        yield _lost(old, new, "answer", old.answer)
    elif new.answer in WRONG:
        yield Change(old.case, "answer", None, new.answer, WORSE, reason=new.answer_reason)
    if old.peak_bytes and old.status == "ok":
        known = new.peak_bytes and new.status == "ok"
        yield _of_peaks(old, new) if known else _lost(old, new, "peak", old.peak_bytes)
    if before := _seconds(old):
        after = _seconds(new)
        lost = _lost(old, new, "time", _milliseconds(before))
        untimed = new.status == "ok" and not timed
        yield _of_times(old, new, before, after) if after else replace(lost, verdict=UNMEASURED) if untimed else lost


def _gained(row: Row) -> Change:
    """Return a row that only the new run has, and what is wrong with it: there is nothing that it is better than."""
    wrong = f"its answer is wrong: {row.answer}" if row.answer in WRONG else ""
    return Change(row.case, "row", None, row.status, NEW, reason=wrong or next(iter(row.reasons), ""))


def _lost(old: Row, new: Row, figure: str, before: int | str) -> Change:
    """Return a figure that was known and is not any more: what nobody measured must not pass for what is as good."""
    why = new.answer_reason if figure == "answer" else ""
    reason = why or next(iter(new.reasons), "") or "the new run does not have it"
    return Change(old.case, figure, before, None, WORSE, reason=reason)


def _of_answers(old: str, new: str) -> str:
    if old == new:
        return SAME
    if (old in WRONG) != (new in WRONG):
        return WORSE if new in WRONG else BETTER
    if old in WRONG or not {old, new} <= set(LADDER):  # another version may have other rungs
        return UNRESOLVED
    return WORSE if LADDER.index(new) > LADDER.index(old) else BETTER


def _of_peaks(old: Row, new: Row) -> Change:
    """Judge two peaks: a difference counts beyond the meters' resolution and 2 %.

    Of a row that may take more or less, by its repetitions or its child processes, all of what it may take must lie
    beyond all of the other's; it is the same where the least and the most are.
    """
    assert old.peak_bytes and new.peak_bytes
    ratio = new.peak_bytes / old.peak_bytes
    margin = max(old.resolution, new.resolution, MEMORY_MARGIN * old.peak_bytes)
    least, most = new.span_bytes or (new.peak_bytes, new.peak_bytes)
    before = old.span_bytes or (old.peak_bytes, old.peak_bytes)
    verdict, reason = UNRESOLVED, ""
    if doubts := sorted({*old.doubts, *new.doubts}):
        reason = ", ".join(doubts)
    elif max(abs(least - before[0]), abs(most - before[1])) <= margin:
        verdict = SAME
    elif least - before[1] > margin or before[0] - most > margin:
        verdict = WORSE if least > before[1] else BETTER
    else:
        reason = f"{shown(before[0])} to {shown(before[1])} before, {shown(least)} to {shown(most)} now"
    return Change(old.case, "peak", old.peak_bytes, new.peak_bytes, verdict, ratio, reason)


def _seconds(row: Row) -> list[float]:
    """Return the step time of each process in seconds."""
    return [seconds for record in row.records if (seconds := step_time(record)) is not None]


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:,.1f} ms"


def _of_times(old: Row, new: Row, before: list[float], after: list[float]) -> Change:
    """Judge a time as a multiple of its own run's baselines: machines are slower on some days than on others.

    So that the baselines themselves take longer shows as unresolved: it may be the machine, or all that was run.
    """
    was, now = old.speed, new.speed
    if was is None or now is None:
        seen = Interval(min(after) / max(before), max(after) / min(before))
        few = min(len(before), len(after)) < LEAST_PROCESSES
        verdict = SAME if seen.inside(1 / MARGIN, MARGIN) and not few else UNRESOLVED
        other = "this machine's hour, or all that was run: other rows are compared as multiples of it"
        other = other if new.case.is_baseline else "a run has no time of its baselines, of which times are multiples"
        reason = (
            ""
            if verdict == SAME
            else "too few rounds"
            if few and 1 in seen
            else f"{seen.low:.2f} to {seen.high:.2f} x"
            if 1 in seen
            else other
        )
        ratio = median(after) / median(before)
        return Change(old.case, "time", _milliseconds(before), _milliseconds(after), verdict, ratio, reason)
    ratio, interval = now.ratio / was.ratio, now.change_since(was, CHANGE_ERROR)
    verdict = OF_WORD.get(word_of(ratio, interval), UNRESOLVED) if interval is not None else UNRESOLVED
    reason = "too few rounds" if interval is None else ""
    before_after = f"{was.ratio:.2f} x", f"{now.ratio:.2f} x"
    return Change(old.case, "time", *before_after, verdict, ratio, reason, interval=interval)
