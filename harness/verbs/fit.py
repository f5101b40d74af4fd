"""Find the longest value of one size that fits a budget: as predicted at most, then confirmed by runs."""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.contract.plugins import Plugins, nearest, printable
from harness.machine import facts, gpu, orphans
from harness.records import Case, Fit, Record, store
from harness.records.record import OUT_OF_MEMORY, refusal_of
from harness.run import alone, bench, locks, prepare_data, template
from harness.run.guards import outlasting
from harness.run.schedule import obstacle
from harness.suite.bounds import SuiteError
from harness.suite.plan import Plan
from harness.suite.units import shown
from harness.verbs.limits import too_large
from harness.verbs.machine import ELSEWHERE, Machine
from harness.verbs.plan import PlanRow, beyond_host, of_cases, refused
from harness.verdicts import expressions

STEP = 1 / 20
"""How far apart the largest value that passed and the smallest that failed may end, as a share of the value."""
GRAIN = 1 / 64
"""Values are multiples of a power of two of about this share of them, so that nobody reads 16,381 tokens."""
RUNS = 5
"""Real runs for each strategy, at most."""
FLAT = 8
"""By how much a value grows whose need has not grown yet."""
LARGEST = 1 << 26
"""The largest value that is tried."""
NEIGHBOURS = 1024
"""Values above the least of which each is held against the workload: the most heads that a model can have."""


@template.forking()
def run(
    search: "Search", budgets: Sequence[int | None], results: Path, predict_only: bool
) -> tuple[Path, list[Record]]:
    """Search the limit of every row within each budget, None for the memory there is, and write the limits.

    Return the file and its records: one with the suite's claims, and one for each row. Nothing is written before the
    first limit is known.

    Raise SuiteError for a size that the workload does not have, or that has gaps, and for a corpus that cannot be made;
    StoreError for results that cannot be written, and ClaimError for a claim that cannot be read.
    """
    for claim in search.plan.suite.claims:
        expressions.parsed(claim.that)
    folder = results / f"{search.plan.name}_fit" / facts.name()
    here = [place for place in search.plan.places if not search.machine.is_elsewhere(place)]
    with locks.measuring(folder, () if predict_only else here):
        orphans.sweep()
        search.plan = prepare_data.closed(search.plan, search.plugins, search.cache)
        path = store.next_file(folder, facts.commit())
        rows = [search.record(Record(heading=bench.heading(search.plan, search.plugins)))]
        write = alone.writer(path, rows[0])
        for budget in budgets:
            for bracket in search.predicted(budget):
                limit = limit_of(bracket, search.over)
                if not predict_only:
                    limit = search.confirmed(bracket, limit, lambda run: write(search.record(run)))
                rows.append(search.record(bracket.record(search.over, limit)))
                write(rows[-1])
    return path, rows


@dataclass
class Bracket:
    """What is predicted of one row: the largest value that fits and the smallest that does not, with what they need.

    `asked` is the budget that was named in bytes, None where the memory of the machine is the limit; `base` is what the
    least value needs, and `stride` how far the last value that fits lies above the one before; `best` is the prediction
    of the largest that fits, None where nothing does; `of_host` says what the smallest that does not takes
    of the memory beside a GPU, where that decides; `most` is the largest value that may be tried, since the workload
    takes no more; `refused` are values that it did not take, and why.
    """

    case: Case
    least: int
    asked: int | None = None
    fits: tuple[int, int] | None = None
    fails: tuple[int, int] | None = None
    base: int = 0
    stride: int = 0
    reason: str = ""
    best: PlanRow | None = None
    of_host: str = ""
    most: int = LARGEST
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def budget(self) -> int:
        """What each rank of the row may take, in bytes."""
        assert self.case.budget_bytes is not None
        return self.case.budget_bytes

    def refusal(self, over: str, value: int) -> str:
        """Say that the workload does not take a value."""
        return refusal_of(over, value, self.refused.get(value, ""))

    def next(self) -> int | None:
        """Return the value to predict next; None when the bracket is closed, or cannot be."""
        if self.reason:
            return None
        budget = self.budget
        if self.fits is None:
            return self.least if self.fails is None else None
        value, need = self.fits
        if value >= self.most:
            return None
        x, y, room = value - self.least, need - self.base, budget - self.base
        closest = value + grain(value)
        if self.fails is None:
            guess = rounded(self.least + x * room // y) if y > 0 else value * max(FLAT, budget // max(need, 1))
            farther = value + 2 * self.stride  # where steps are short they grow: the need does less than in proportion
            least = farther if self.stride < value / 8 else closest
            return min(self.most, max(least, min(guess, 16 * value)))
        above, over = self.fails
        if above <= closest:
            return None
        guess = rounded(self.least + between((x, y), (above - self.least, over - self.base), room))
        return min(max(guess, closest), above - 1, self.most)

    def take(self, value: int, row: PlanRow) -> None:
        """Narrow the bracket by what was predicted for a value."""
        if row.need_bytes is None:
            self.reason = row.reason or "it cannot be predicted"
        elif row.fits:
            self.base = row.need_bytes if self.fits is None else self.base
            self.stride = value - (self.fits[0] if self.fits is not None else 0)
            self.fits, self.best = (value, row.need_bytes), row
        else:
            self.fails = (value, row.need_bytes)
            self.of_host = beyond_host(row) if row.over_host_bytes else ""

    def record(self, over: str, limit: Fit) -> Record:
        """Return the record of its limit: of the case at the least value, below which none was tried.

        Where that could not be predicted, the record says why under `missing`.
        """
        missing = {"predicted": limit.reason} if self.fits is None and self.fails is None else {}
        return Record(case=at(self.case, over, self.least), limits=limit, missing=missing)


def between(low: tuple[int, int], high: tuple[int, int], wanted: int) -> int:
    """Return about where a need reaches what is wanted, from values and needs that are less and more.

    All are counted from the least value and what that needs: so a need is nearly a straight line between logarithms,
    whatever power of the value it is.
    """
    (x, y), (far, most) = low, high
    if min(x, y) <= 0:
        return x + round((far - x) * min(0.9, max(0.1, (wanted - y) / max(most - y, 1))))
    share = math.log(max(wanted, y) / y) / math.log(most / y) if most > y else 0.5
    return round(x * (far / x) ** min(0.98, max(0.02, share)))


def grain(value: int) -> int:
    """Return the step between values of about this size: a power of two, or 1."""
    return 1 << max(0, math.floor(math.log2(max(1.0, value * GRAIN))))


def rounded(value: int) -> int:
    """Round down to a whole number of grains."""
    return max(1, value - value % grain(value))


def limit_of(bracket: Bracket, over: str) -> Fit:
    """Return the limit of a row, the largest value that fits at most, or why there is none."""
    reason = bracket.reason
    if bracket.fits is None and bracket.fails is not None:
        value, need = bracket.fails
        reason = f"{over} {value:,} {bracket.of_host or f'is predicted to take up to {shown(need)} already'}"
    elif bracket.fits is not None and bracket.fits[0] >= bracket.most:
        value = bracket.fits[0]
        unpredicted = f"nothing above {over} {value:,} is predicted"
        reason = bracket.refusal(over, value + 1) if bracket.most < LARGEST else unpredicted
    elif bracket.fails is not None and bracket.of_host:
        reason = f"{over} {bracket.fails[0]:,} {bracket.of_host}"
    return Fit(
        over=over,
        budget_bytes=bracket.budget,
        predicted=bracket.fits[0] if bracket.fits else None,
        predicted_peak_bytes=bracket.best.peak_bytes if bracket.best else None,
        predicted_reserved_bytes=bracket.best.prediction.predicted_reserved_bytes if bracket.best else None,
        host_limit_bytes=bracket.best.host_limit_bytes if bracket.best else None,
        at_most_bytes=bracket.best.at_most_bytes if bracket.best else None,
        reason=reason,
        open=bracket.fits is not None and (bracket.fails is None or bool(bracket.reason)),
    )


def completed(machine: Machine) -> Machine:
    """Return a machine with the memory of this one where it has none of its own."""
    return replace(
        machine,
        host_bytes=machine.host_bytes or facts.total_bytes(),
        device_bytes=machine.device_bytes or gpu.usable_bytes(),
    )


def brackets(plan: Plan, over: str, budget: int | None, machine: Machine | None = None) -> list[Bracket]:
    """Open a bracket for each row of each place, at the least value of the size that the plan has for it.

    Without a budget a row may take that of the suite, or without one the memory there is, of which ranks have a part
    each: that of the machine, or where it has none that of this one. Rows on a GPU are left out where none is seen or
    supposed. The control is left out too: it would be the baseline again. Raise SuiteError for what is no such size,
    and where no row is left.
    """
    here = completed(machine or Machine())
    brackets: dict[str, Bracket] = {}
    for case in plan.cases:
        value = case.shape.get(over)
        if isinstance(value, bool) or not isinstance(value, int):
            sizes = [name for name, size in case.shape.items() if isinstance(size, int) and not isinstance(size, bool)]
            what = "is not a whole number" if over in case.shape else "is not a size"
            near = nearest(over, sizes) if over not in case.shape else ""
            remedy = near if near.endswith("?") else f": use one of {', '.join(sizes)}"
            raise SuiteError(f"{plan.where}: '{printable(over)[:40]}' {what} of the workload '{case.workload}'{remedy}")
        if case.is_control:
            continue
        asked = case.budget_bytes if budget is None else budget
        if (allowed := here.limit(case.model_copy(update={"budget_bytes": asked}))) is None:
            continue
        case = case.model_copy(update={"budget_bytes": allowed})
        bracket = brackets.setdefault(at(case, over, 1).digest(), Bracket(case, value, asked))
        bracket.least = min(bracket.least, value)
    if not brackets:
        raise SuiteError("the memory of the GPU is not known here: give --budget, --gpu or --gpu-memory")
    return list(brackets.values())


def at(case: Case, over: str, value: int) -> Case:
    """Return the case at another value of the size."""
    return case.model_copy(update={"shape": case.shape | {over: value}})


@dataclass
class Search:
    """One search: a plan, and the size that is varied; `log` is called with what is going on."""

    plan: Plan
    plugins: Plugins
    names: tuple[str, ...]
    over: str
    cache: Path
    log: Callable[[str], None] = lambda text: None
    machine: Machine = field(default_factory=Machine)
    run_id: str = field(default_factory=lambda: f"fit-{os.getpid()}")

    def predicted(self, budget: int | None) -> list[Bracket]:
        """Bracket the limit of every row, the values of one turn in one process.

        Rows are judged as `harness plan` does: by the budget, or by the memory of the machine where there is none.
        """
        machine = completed(self.machine)
        rows = brackets(self.plan, self.over, budget, machine)
        for place in self.plan.places:
            if all(row.case.place != place for row in rows):
                self.log(f"{place} is left out, as its memory is not known: give --budget, --gpu or --gpu-memory")
        for row in {at(row.case, self.over, 1).comparison_key: row for row in rows}.values():
            self.refuse_gaps(row)
        while True:
            turns = [(row, value) for row in rows if (value := self.next(row)) is not None]
            if not turns:
                return rows
            values = sorted({value for _, value in turns})
            self.log(f"predicting {self.over} {', '.join(f'{value:,}' for value in values)}")
            cases = [
                at(row.case, self.over, value).model_copy(update={"budget_bytes": row.asked}) for row, value in turns
            ]
            predicted = of_cases(cases, self.plan, self.plugins, self.names, machine, calls=False)
            for (row, value), prediction in zip(turns, predicted, strict=True):
                row.take(value, prediction)

    def refuse_gaps(self, row: Bracket) -> None:
        """Raise SuiteError for a size of which the workload takes a larger value again after one that it refuses.

        So it is where other sizes must divide it, or the other way round; a search would end at the first gap.
        """
        taken = [self.takes(row, value) for value in range(row.least, row.least + NEIGHBOURS + 1)]
        refused = taken.index(False) if False in taken else len(taken)
        if True in taken[refused:]:
            larger = row.least + taken.index(True, refused)
            raise SuiteError(
                f"{self.plan.where}: no largest {self.over} can be searched for, as the workload '{row.case.workload}' "
                f"takes {larger:,} but not {row.least + refused:,}: list the values to try in the suite, and `harness "
                "plan` says which of them fit"
            )

    def next(self, row: Bracket) -> int | None:
        """Return the value of a row to predict next; one that the workload does not take bounds the row."""
        while (value := row.next()) is not None and not self.takes(row, value):
            if row.fits is None:
                row.reason = row.refusal(self.over, value)
            else:
                row.most = self.largest(row, row.fits[0], value)
        return value

    def takes(self, row: Bracket, value: int) -> bool:
        """Return whether the workload takes a value."""
        if (why := refused(self.plugins, at(row.case, self.over, value))) is not None:
            row.refused[value] = why
        return why is None

    def largest(self, row: Bracket, value: int, above: int) -> int:
        """Return the largest value that the workload takes, from one that it takes up to one that it does not."""
        return value + bisect_left(range(value + 1, above), True, key=lambda each: not self.takes(row, each))

    def confirmed(self, row: Bracket, limit: Fit, write: Callable[[Record], None]) -> Fit:
        """Run a row around its predicted limit, each time in a process with that budget; `write` each run."""
        unfit = limit.reason if limit.predicted is None else ""
        reason = obstacle(self.plugins, row.case) or unfit or self.not_run(row)
        if reason or limit.predicted is None:
            return limit.model_copy(update={"reason": reason})
        passed, failed, how = None, None, ""
        runs = 0
        value: int | None = limit.predicted
        while value is not None and runs < RUNS:
            if not self.takes(row, value):
                if passed is None or (most := self.largest(row, passed, value)) == passed:
                    reason = row.refusal(self.over, value if passed is None else passed + 1)
                    break
                value = most
            self.log(f"running {row.case.label} at {self.over} {value:,}")
            try:
                record = self.measured(at(row.case, self.over, value))
            except SuiteError as error:  # the corpus has too few tokens for it, which a prediction supposes
                reason = str(error)
                break
            write(record)
            runs += 1
            if record.status == "ok":
                passed = value
            elif record.status in OUT_OF_MEMORY:
                failed, how = value, record.status
            else:
                reason = str(record.evidence.get("message", record.status))
                break
            value = following(passed, failed)
        known = {"passed": passed, "failed": failed, "how": how, "runs": runs, "reason": reason or limit.reason}
        return limit.model_copy(update=known)

    def not_run(self, row: Bracket) -> str:
        """Return why a row is not run: it is for another machine, would take too long, or more memory than is free.

        An empty text where it is run.
        """
        if self.machine.is_elsewhere(row.case.place):
            return f"not run: {ELSEWHERE}"
        return self.too_long(row) or (too_large(row.best) if row.best is not None else "")

    def too_long(self, row: Bracket) -> str:
        """Return why a row is not run: a run is expected to take longer than the suite allows; else an empty text."""
        seconds = row.best.seconds if row.best is not None else None
        reason = "" if seconds is None else outlasting(seconds, self.plan.suite)
        return reason and f"not run: {reason}"

    def measured(self, case: Case) -> Record:
        """Run one case for its memory alone."""
        return alone.measured(case, self.plan, self.plugins, self.names, self.cache, self.run_id)

    def record(self, record: Record) -> Record:
        """Complete a record by what identifies the search."""
        return alone.complete(record, self.plan, self.plugins, self.run_id)


def following(passed: int | None, failed: int | None) -> int | None:
    """Return the value to run next: a step beyond what is known, or between; None when both are about a step apart."""
    if passed is None:
        return None if failed is None or failed <= 1 else rounded(min(failed - 1, round(failed * (1 - STEP))))
    step = max(grain(passed), round(passed * STEP))
    if failed is None:
        return rounded(passed + step)
    return None if failed - passed <= 1.5 * step else rounded((passed + failed) // 2)
