"""Choose among combinations of strategies: predict them, measure the most promising few, name the best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.contract.plugins import Plugins
from harness.contract.strategy import DECLARED
from harness.machine import facts
from harness.records import Applied, Case, Record, Slot, store
from harness.records.case import CONTROL
from harness.records.record import Heading
from harness.run import bench, locks, session, template
from harness.run.schedule import obstacle
from harness.suite.plan import Comparison, Plan
from harness.verbs.combinations import MOST, Choice, ranks_of
from harness.verbs.machine import ELSEWHERE, Machine
from harness.verbs.plan import TIMED, PlanRow, beyond_host, need, of_cases, of_plan, taken
from harness.verbs.search import Patient, Predict, search
from harness.verdicts import judge
from harness.verdicts.judge import Row

NEAR = 1.25
"""A combination is measured up to this many times the least predicted time: predicted ratios err by about as much."""
MEASURED = 6
"""Combinations that are measured at most."""
ROUNDS = 3
"""Time rounds where nobody asks for any: what is fastest is said of times alone."""
ANSWERS = {
    "exact": {"bit_exact", "reassociated"},
    "reordered": {"reordered"},
    "lower_precision": {"lower_precision"},
    "approximate": {"approximate"},
}


@dataclass(frozen=True)
class Advice:
    """Which combination to use for one comparison of a plan, and why.

    `predicted` are all combinations, the baseline first, or those that were tried where it was `searched` for one;
    `front` those that no other beats in both peak and time; `rows` what was measured, and `usable` those of them that
    may be used, the fastest first; `chosen` the one to use, as it was predicted, None where none will do. `left_out`
    says which strategies were not combined, and why.
    """

    case: Case
    predicted: tuple[PlanRow, ...]
    front: tuple[PlanRow, ...]
    rows: tuple[Row, ...]
    chosen: PlanRow | None
    usable: tuple[Row, ...] = ()
    searched: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def choice(self) -> str | None:
        """The label of the one to use."""
        return None if self.chosen is None else self.chosen.case.label

    @property
    def word(self) -> str:
        """What is chosen of those that are predicted to fit: the fastest, or where times are rough the plainest."""
        return "fastest" if are_timed([row for row in self.predicted if row.fits]) else "plainest"


def front(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows that no other beats in both predicted peak and predicted time, the fastest first."""
    known = sorted(
        (row for row in rows if row.peak_bytes is not None and row.seconds is not None),
        key=lambda row: (row.seconds or 0.0, row.peak_bytes or 0, len(row.case.strategies)),
    )
    best: list[PlanRow] = []
    for row in known:
        if not best or (row.peak_bytes or 0) < (best[-1].peak_bytes or 0):
            best.append(row)
    return best


def promising(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return what to measure: rows that fit and are predicted to be nearly the fastest, with fewer members first."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return []
    timed = sorted(fitting, key=lambda row: (row.seconds or float("inf"), len(row.case.strategies)))
    least = timed[0].seconds
    return [row for row in timed if least is None or (row.seconds or 0.0) <= NEAR * least][:MEASURED]


@template.forking()
def advise(
    plan: Plan,
    plugins: Plugins,
    options: bench.Options,
    machine: Machine,
    allowed: Sequence[str],
    everything: bool,
    predict_only: bool,
    progress: bench.Progress,
    only: str | None = None,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> list[Advice]:
    """Advise on each comparison of a plan.

    With `only`, of the strategies whose name contains it. Comparisons in which nothing may be combined are left out,
    and those on another GPU than the one here are not measured: `on_note` gets a sentence on each of their places.
    Raises SuiteError where none is left, StoreError for results that cannot be written.
    """
    name, choice = plan.where, Choice(plugins, allowed, everything, only, ranks_of(plan))
    combined = [each for each in plan.comparisons if choice.members(each)]
    for place in dict.fromkeys(each.baseline.place for each in plan.comparisons if each not in combined):
        if combined:
            on_note(f"{name}: no strategy of it may be combined on {place}: it is left out")
    groups = combined or plan.comparisons
    applied = [choice.demanded(each, name) for each in groups]
    whole = [choice.listed(each, its) for each, its in zip(groups, applied, strict=True)]
    in_full = replace(plan, comparisons=tuple(filter(None, whole)))
    progress.predicting(len(in_full.cases))
    rows_in_full = iter(of_plan(in_full, plugins, options.plugins, machine, progress.predicted))

    def predict(cases: Sequence[Case], seconds: float) -> list[PlanRow]:
        return of_cases(cases, plan, plugins, options.plugins, machine, progress.predicted, seconds=seconds)

    predicted = [
        next(rows_in_full) if group is not None else _searched(name, comparison.baseline, its, choice, predict, on_note)
        for comparison, its, group in zip(groups, applied, whole, strict=True)
    ]
    elsewhere = {place for each in groups if machine.is_elsewhere(place := each.baseline.place)}
    for place in () if predict_only else sorted(elsewhere):
        on_note(f"{name}: nothing is measured on {place}: {ELSEWHERE}")
    if choice.ranks > 1 and not predict_only:
        on_note(f"{name}: nothing is measured on {choice.ranks} ranks: `harness run` measures a suite there")

    def is_measured(case: Case) -> bool:
        return not predict_only and choice.ranks == 1 and case.place not in elsewhere and not obstacle(plugins, case)

    chosen = [promising(rows) if is_measured(rows[0].case) else [] for rows in predicted]
    measured = _measured(plan, plugins, options, predicted, chosen, progress) if any(chosen) else {}
    return [
        replace(
            _advice(rows, measured.get(rows[0].case.comparison_key, ()), allowed),
            searched=group is None,
            left_out=tuple(choice.excluded(each)),
        )
        for rows, group, each in zip(predicted, whole, groups, strict=True)
    ]


def _searched(
    name: str,
    baseline: Case,
    applied: Sequence[Applied],
    choice: Choice,
    predict: Predict,
    on_note: Callable[[str], None],
) -> list[PlanRow]:
    """Return what is predicted on the way to a combination that fits; `on_note` gets each step of it."""
    tried = "each is tried alone" if choice.ranks == 1 else "what divides the run is tried alone"
    on_note(
        f"{name}: {len(applied)} strategies give more than {MOST} combinations on {baseline.place}: {tried}, and then "
        "the one that saves most added, again and again"
    )

    def on_step(row: PlanRow) -> None:
        on_note(f"so far {row.case.label} {_state(row)}")

    return search(baseline, applied, choice.plugins, Patient(predict), on_step, choice.ranks)


def _state(row: PlanRow) -> str:
    """Write how far a combination on the way is from what it may take."""
    return "fits" if row.fits else beyond_host(row) if row.over_host_bytes else f"takes {need(row)}"


def _measured(
    plan: Plan,
    plugins: Plugins,
    options: bench.Options,
    predicted: Sequence[Sequence[PlanRow]],
    chosen: Sequence[Sequence[PlanRow]],
    progress: bench.Progress,
) -> dict[str, tuple[Row, ...]]:
    """Run the chosen rows of every comparison as a suite of its own; return the judged rows by comparison.

    The baseline and the control are measured with them, if only to say by how much they do not fit.
    """
    comparisons = []
    for rows, few in zip(predicted, chosen, strict=True):
        if few:
            control = rows[0].case.model_copy(update={"strategies": (Applied(name=CONTROL),)})
            cases = [row.case for row in few if not row.case.is_baseline]
            comparisons.append(Comparison((rows[0].case, control, *cases)))
    narrow = replace(plan, name=f"{plan.name}-advice", comparisons=tuple(comparisons))
    rounds = options.rounds or plan.suite.rounds or ROUNDS
    path = session.run(narrow, plugins, replace(options, all_rounds=True, rounds=rounds), progress)
    return {table.case.comparison_key: table.rows for table in judge.judge(store.read(path)[0])}


def of_predictions(rows: Sequence[PlanRow]) -> Advice:
    """Advise from predictions alone: the fastest that fits, or where not all of them are timed the plainest.

    Where rows divide the run it is one of them: nothing is expected of their times, as what ranks exchange is unknown.
    """
    divided = [row for row in rows if row.case.ranks > 1]
    fitting = [row for row in divided or rows if row.fits]
    timed = front(fitting) if are_timed(fitting) else []
    best = timed[0] if timed else min(fitting, key=preference, default=None)
    return Advice(rows[0].case, tuple(rows), () if divided else tuple(front(rows)), (), best)


def are_timed(rows: Sequence[PlanRow]) -> bool:
    """Check whether the expected times of rows rest on operators that were timed, so that the rows can be ordered."""
    return all(row.timed >= TIMED for row in rows)


def preference(row: PlanRow) -> tuple[float, ...]:
    """Return what to prefer where no times are known: an answer like the baseline's, few strategies, little memory."""
    answer = row.prediction.declared_answer or DECLARED[0]
    return DECLARED.index(answer), len(row.case.strategies), taken(row)


def _advice(rows: Sequence[PlanRow], measured: Sequence[Row], allowed: Sequence[str]) -> Advice:
    right = set().union(*(ANSWERS[kind] for kind in ("exact", *allowed)))
    advice = of_predictions(rows)
    if measured:
        limits = {row.case.label: row.limit_bytes for row in rows}
        usable = [
            row
            for row in measured
            if row.status == "ok"
            and _within(row.peak_bytes, limits.get(row.label))
            and (row.answer in right or row.case.is_baseline)
            and not row.case.is_control
            and row.step_seconds is not None
        ]
        usable.sort(key=lambda row: row.step_seconds or 0.0)
        best = usable[0].label if usable else None
        chosen = next((row for row in rows if row.case.label == best), None)
        return replace(advice, rows=tuple(measured), usable=tuple(usable), chosen=chosen)
    return advice


def _within(peak: int | None, limit: int | None) -> bool:
    """Check whether a measured peak is within a limit: only a budget ends the process that exceeds it."""
    return limit is None or (peak is not None and peak <= limit)


def saved(answers: Sequence[Advice], plan: Plan, plugins: Plugins, results: Path) -> Path:
    """Write every prediction that advice rests on as a record, so that it can be given again for any memory.

    They are put beside the suite where that was measured, since only the newest file of a folder is shown. Returns the
    file. Raises StoreError where it cannot be written.
    """
    folder = results / plan.name / facts.name()
    if any(_is_measured(file) for file in folder.glob("*.jsonl")):
        folder = results / f"{plan.name}_advice" / facts.name()
    with locks.measuring(folder, ()):
        path = store.next_file(folder, facts.commit())
        origin = bench.origin_of(plan, plugins)
        store.append(path, Record(heading=Heading(title=plan.suite.title), origin=origin))
        for position, row in enumerate(row for advice in answers for row in advice.predicted):
            record = Record(
                origin=origin,
                slot=Slot(case=row.case.digest(), kind="predict"),
                position=position,
                case=row.case,
                missing={"predicted_peak_bytes": row.reason} if row.reason else {},
                notes={"gpu": row.supposed} if row.supposed else {},
                prediction=row.prediction.model_copy(update={"predicted_work": ()}),
            )
            store.append(path, record)
    return path


def _is_measured(file: Path) -> bool:
    """Check whether a file has more than predictions."""
    return any(record.slot is not None and record.slot.kind != "predict" for record in store.read(file)[0])
