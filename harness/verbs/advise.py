"""Choose among combinations of strategies: predict all, measure the most promising few, say which one to use."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.contract.plugins import Plugins
from harness.contract.strategy import Strategy
from harness.records import Applied, Case, store
from harness.records.case import CONTROL
from harness.run import session
from harness.run.schedule import obstacle
from harness.suite.plan import Group, Plan
from harness.suite.schema import SuiteError
from harness.verbs.plan import Foreseen, Machine, of_plan
from harness.verdicts import judge
from harness.verdicts.judge import Row

MOST = 2000
"""Combinations that are predicted at most: some minutes of work."""
NEAR = 1.25
"""Up to how many times the least predicted time a combination is measured: predicted ratios err by about as much."""
MEASURED = 6
KINDS = ("exact", "reordered", "lower_precision", "approximate")
ANSWERS = {
    "exact": {"bit_exact", "reassociated"},
    "reordered": {"reordered"},
    "lower_precision": {"lower_precision"},
    "approximate": {"approximate"},
}
DATA_PARTS = {"rows", "source", "windows", "order", "batches", "transfer"}


@dataclass(frozen=True)
class Advice:
    """What was found for one group of a plan.

    `foreseen` are all combinations, the baseline first; `front` those that no other beats in both peak and time;
    `rows` what was measured; `choice` the label of the one to use, None where none will do.
    """

    case: Case
    foreseen: tuple[Foreseen, ...]
    front: tuple[Foreseen, ...]
    rows: tuple[Row, ...]
    choice: str | None


def kind_of(strategy: Strategy) -> str:
    """Say what a strategy does to the answer, as it declares itself."""
    if strategy.approximate:
        return "approximate"
    if strategy.precision:
        return "lower_precision"
    return "reordered" if strategy.feeds == "reordered" else "exact"


def members(group: Group, plugins: Plugins, allowed: Sequence[str], everything: bool) -> list[Applied]:
    """List the strategies to combine: those that the group names, or all of the model's, of the kinds allowed.

    Strategies of data are left out of `everything`: they take no part in what a step holds.
    """
    case = group.baseline
    workload, place = plugins.workloads[case.workload], case.place
    named = {str(applied): applied for each in group.cases for applied in each.strategies}
    if everything:
        named |= {
            name: Applied(name=name)
            for name, strategy in plugins.strategies.items()
            if strategy.rewrites and not DATA_PARTS & set(strategy.rewrites)
        }
    return [
        applied
        for applied in named.values()
        if applied.name != CONTROL
        and not plugins.strategies[applied.name].ranks  # what is expected of a step knows nothing of ranks
        and kind_of(plugins.strategies[applied.name]) in ("exact", *allowed)
        and place.backend in plugins.strategies[applied.name].on
        and plugins.strategies[applied.name].obstacle(place, workload) is None
    ]


def combinations(found: Sequence[Applied], plugins: Plugins) -> Iterator[tuple[Applied, ...]]:
    """Give every subset, in order, of which no two members rewrite the same part: the second would hide the first."""

    def grown(rest: Sequence[Applied], taken: frozenset[str]) -> Iterator[tuple[Applied, ...]]:
        yield ()
        for at, applied in enumerate(rest):
            parts = set(plugins.strategies[applied.name].rewrites)
            if not parts & taken:
                for others in grown(rest[at + 1 :], taken | parts):
                    yield (applied, *others)

    return grown(found, frozenset())


def group_of(group: Group, plugins: Plugins, allowed: Sequence[str], everything: bool, name: str) -> Group:
    """Give the group with every combination in it; raise SuiteError where there are too many, or none."""
    found = members(group, plugins, allowed, everything)
    if not found:
        raise SuiteError(
            f"{name}: no strategy of it may be combined: add some, or give --allow lower_precision or --all"
        )
    rows = list(itertools.islice(combinations(found, plugins), MOST + 1))
    if len(rows) > MOST:
        told = f"{name}: {len(found)} strategies give more than {MOST} combinations"
        raise SuiteError(f"{told}: narrow them with -k, or name fewer in the suite")
    return Group(tuple(group.baseline.model_copy(update={"strategies": row}) for row in rows))


def front(rows: Sequence[Foreseen]) -> list[Foreseen]:
    """Keep the rows that no other beats in both predicted peak and predicted time, the fastest first."""
    known = sorted(
        (row for row in rows if row.peak_bytes is not None and row.seconds is not None),
        key=lambda row: (row.seconds or 0.0, row.peak_bytes or 0, len(row.case.strategies)),
    )
    kept: list[Foreseen] = []
    for row in known:
        if not kept or (row.peak_bytes or 0) < (kept[-1].peak_bytes or 0):
            kept.append(row)
    return kept


def promising(rows: Sequence[Foreseen]) -> list[Foreseen]:
    """Choose what to measure: those that fit and are predicted to be nearly the fastest, with fewer members first."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return []
    timed = sorted(fitting, key=lambda row: (row.seconds or float("inf"), len(row.case.strategies)))
    least = timed[0].seconds
    return [row for row in timed if least is None or (row.seconds or 0.0) <= NEAR * least][:MEASURED]


def advise(
    plan: Plan,
    plugins: Plugins,
    options: session.Options,
    machine: Machine,
    allowed: Sequence[str],
    everything: bool,
    predict_only: bool,
    progress: session.Progress,
    tell: Callable[[Case], None] = lambda case: None,
) -> list[Advice]:
    """Advise on each group of a plan.

    Raises SuiteError where there is nothing to combine, StoreError for results that cannot be written.
    """
    wide = [group_of(group, plugins, allowed, everything, str(plan.path)) for group in plan.groups]
    seen = of_plan(replace(plan, groups=tuple(wide)), plugins, options.plugins, machine, tell)
    chosen = [[] if predict_only or obstacle(plugins, rows[0].case) else promising(rows) for rows in seen]
    measured = _measured(plan, plugins, options, seen, chosen, progress) if any(chosen) else {}
    return [_advice(rows, measured.get(rows[0].case.group, ()), plugins, allowed) for rows in seen]


def _measured(
    plan: Plan,
    plugins: Plugins,
    options: session.Options,
    seen: Sequence[Sequence[Foreseen]],
    chosen: Sequence[Sequence[Foreseen]],
    progress: session.Progress,
) -> dict[str, tuple[Row, ...]]:
    """Run the chosen rows of every group as a suite of its own; return the judged rows by group.

    The baseline and the control are measured with them, if only to say by how much they do not fit.
    """
    groups = []
    for rows, few in zip(seen, chosen, strict=True):
        if few:
            control = rows[0].case.model_copy(update={"strategies": (Applied(name=CONTROL),)})
            cases = [row.case for row in few if row.case.strategies]
            groups.append(Group((rows[0].case, control, *cases)))
    narrow = replace(plan, name=f"{plan.name}-advice", groups=tuple(groups))
    path = session.run(narrow, plugins, replace(options, all_rounds=True), progress)
    return {table.case.group: table.rows for table in judge.judge(store.read(path)[0])}


def _advice(rows: Sequence[Foreseen], measured: Sequence[Row], plugins: Plugins, allowed: Sequence[str]) -> Advice:
    right = set().union(*(ANSWERS[kind] for kind in ("exact", *allowed)))
    fitting = front([row for row in rows if row.fits])
    choice: str | None = fitting[0].case.label if fitting else None
    if measured:
        done = [
            row
            for row in measured
            if row.status == "ok"
            and (row.answer in right or not row.case.strategies)
            and not row.case.is_control
            and row.step_seconds is not None
        ]
        choice = min(done, key=lambda row: row.step_seconds or 0.0).label if done else None
    return Advice(rows[0].case, tuple(rows), tuple(front(rows)), tuple(measured), choice)
