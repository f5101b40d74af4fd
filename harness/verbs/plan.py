"""Predict the cases of a plan without running any: peak, phase, whether it fits, and the time of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from harness.backends.cards import CARDS, key_of
from harness.contract.assembly import shape_of
from harness.contract.plugins import Plugins, nearest, printable
from harness.machine import environment, throughput
from harness.records import Case, Prediction, Record
from harness.records.roofline import estimate
from harness.refusal import Refusal
from harness.run import prediction_cache, prepare_data
from harness.run.schedule import PREDICTING_SECONDS
from harness.suite.bounds import SuiteError
from harness.suite.plan import Comparison, Plan
from harness.suite.units import shown
from harness.verbs.machine import Bound, Machine

FUSED_BFLOAT16 = (8, 0)
"""The compute capability from which on torch has kernels of attention in bfloat16 that keep no scores."""
IN_BFLOAT16 = {"bfloat16", "bfloat16_autocast", "bfloat16_stochastic", "float32_master"}
ATTENDING = {"decoder", "documents", "causal_lm", "causal_lm_documents"}
"""Strategies that compute in bfloat16, and workloads whose layers all attend."""
TIMED = 0.9
"""The share of a step's expected time that operators which were timed must have, for a ratio of times."""


@dataclass(frozen=True)
class PlanRow:
    """One case with its prediction; None where there is none, and in `reason` why.

    `seconds` is what a step is expected to take, of which `timed` is the share of operators that were timed here. The
    limit is that of its budget, if it has one, but where `by_memory` says that the memory of its place is narrower.
    `supposed` says for which GPU it is predicted, where nobody knows the one of the machine. `host_limit_bytes` is what
    a case on a GPU may take of the host, where that is known. `without_fused_bfloat16` says of one in bfloat16 that its
    card keeps all scores of attention.
    """

    case: Case
    peak_bytes: int | None
    phase: str | None
    floor_bytes: int | None
    limit_bytes: int | None
    seconds: float | None
    reason: str | None = None
    timed: float = 0.0
    prediction: Prediction = field(default_factory=Prediction)
    by_memory: bool = False
    supposed: str = ""
    host_limit_bytes: int | None = None
    without_fused_bfloat16: bool = False

    @property
    def at_most_bytes(self) -> int | None:
        """What it takes at most; None where too few cases of its kind were ever measured."""
        return self.prediction.at_most_bytes

    @property
    def coverage(self) -> float | None:
        """The probability that it takes no more."""
        return self.prediction.at_most_coverage

    @property
    def need_bytes(self) -> int | None:
        """What to keep free for it: what it takes at most, or the predicted peak where that is not known.

        On a GPU in torch that is allocated: what else a budget or the card bounds comes on top.
        """
        highest = self.peak_bytes if self.at_most_bytes is None else self.at_most_bytes
        return None if highest is None else highest + self.prediction.beside_bytes(self.is_within_budget)

    @property
    def is_within_budget(self) -> bool:
        """Whether it is its budget that bounds it, and not the memory of its place."""
        return self.case.budget_bytes is not None and not self.by_memory

    def time_ratio(self, other: "PlanRow") -> float | None:
        """Return how its step compares with another's; None where it rests on rates, too rough for a ratio."""
        if not (self.seconds and other.seconds) or min(self.timed, other.timed) < TIMED:
            return None
        return self.seconds / other.seconds

    @property
    def over_host_bytes(self) -> int:
        """By how much it is predicted to take more of the host beside a GPU than it may; 0 where that is not known."""
        taken, limit = self.prediction.predicted_host_bytes, self.host_limit_bytes
        return 0 if taken is None or limit is None else max(0, taken - limit)

    @property
    def fits(self) -> bool | None:
        """Whether what it needs is within the limit, and that of the host; None where one of the first is not known."""
        if self.need_bytes is None or self.limit_bytes is None:
            return None
        return self.need_bytes <= self.limit_bytes and not self.over_host_bytes


def row_of(case: Case, record: Record, machine: Machine) -> PlanRow:
    """Return what a prediction means on a machine."""
    rates, prediction = (machine.rates or {}).get(case.place), record.prediction
    step = estimate(prediction.predicted_work, rates) if rates is not None else None

    def left(bound: Bound) -> int:
        return bound.bytes - prediction.beside_bytes(bound.of_budget)

    bound = min(machine.bounds(case), key=left, default=None)
    return PlanRow(
        case=case,
        peak_bytes=prediction.predicted_peak_bytes,
        phase=prediction.predicted_phase,
        floor_bytes=prediction.floor_bytes,
        limit_bytes=bound.bytes if bound is not None else None,
        seconds=step.seconds if step is not None else None,
        reason=record.missing.get("predicted_peak_bytes") or record.evidence.get("message"),
        timed=step.timed if step is not None else 0.0,
        prediction=prediction,
        by_memory=bound is not None and not bound.of_budget,
        supposed=record.notes.get("gpu", "") if key_of(machine.card) is None else "",
        host_limit_bytes=machine.host_limit(case),
        without_fused_bfloat16=_keeps_scores(case, machine),
    )


def _keeps_scores(case: Case, machine: Machine) -> bool:
    """Check whether torch has no fused attention in bfloat16 on the card of a case that is in it."""
    card = CARDS.get(key_of(machine.card) or "")
    old = card is not None and card.capability < FUSED_BFLOAT16 and str(case.place) == "torch/cuda"
    return old and case.workload in ATTENDING and any(applied.name in IN_BFLOAT16 for applied in case.strategies)


def of_cases(
    cases: Sequence[Case],
    plan: Plan,
    plugins: Plugins,
    names: tuple[str, ...],
    machine: Machine,
    on_case: Callable[[Case], None] = lambda case: None,
    calls: bool = True,
    seconds: float = PREDICTING_SECONDS,
) -> list[PlanRow]:
    """Predict cases, in their order, and call `on_case` after each; the data that they read are supposed.

    Documents are made, and a vocabulary of 0 needs the corpus: such cases come back with as many tokens as it has, as a
    run measures them. The row of a case whose corpus cannot be made says why.
    With `calls` the operators of the steps are timed where they are not known yet, if the machine has a cache and a
    step fits. A case that takes longer than `seconds` is not predicted, and its row says so.
    """
    cases, records = _closed(cases, plan, plugins)
    of_key = {case.comparison_key: case for case in reversed(cases) if case.digest() not in records}  # its first case
    supposed = {}
    for key, case in of_key.items():
        try:
            supposed[key] = prepare_data.supposed(plan, case, plugins)
        except SuiteError as error:
            refused = _refused(error)
            records |= {each.digest(): refused for each in cases if each.comparison_key == key}
    open_ = [case for case in cases if case.digest() not in records]
    within = None if machine.cache is None else prediction_cache.folder(machine.cache)
    calls = calls and machine.cache is not None
    predicted = prediction_cache.of_cases(
        open_,
        within,
        supposed,
        plugins,
        names,
        card=machine.card,
        calls=calls,
        steps=plan.suite.memory_steps,
        seconds=seconds,
    )
    for case in cases:
        if case.digest() in records:
            on_case(case)
    for case, record in predicted:
        records[case.digest()] = record
        on_case(case)
    if calls:
        machine = _with_calls(machine, [(case, records[case.digest()]) for case in cases])
    return [row_of(case, records[case.digest()], machine) for case in cases]


def _closed(cases: Sequence[Case], plan: Plan, plugins: Plugins) -> tuple[list[Case], dict[str, Record]]:
    """Return the cases with the vocabularies of their corpora, and records of those whose corpus cannot be made."""
    shapes, refused = {}, {}
    for key, case in {case.comparison_key: case for case in cases}.items():
        alone = replace(plan, comparisons=(Comparison((case.plain,)),))
        try:
            (comparison,) = prepare_data.closed(alone, plugins, environment.cache_folder()).comparisons
        except SuiteError as error:
            refused[key] = _refused(error)
        else:
            shapes[key] = comparison.baseline.shape
    records = {case.digest(): refused[key] for case in cases if (key := case.comparison_key) in refused}
    whole = [case.model_copy(update={"shape": shapes.get(case.comparison_key, case.shape)}) for case in cases]
    return whole, records


def _refused(error: SuiteError) -> Record:
    """Return the record of a case whose corpus cannot be made."""
    return Record(status="unsupported", evidence={"message": str(error)})


def _with_calls(machine: Machine, predicted: Sequence[tuple[Case, Record]]) -> Machine:
    """Return the machine with the times of the calls that the steps make, of places where one of them fits."""
    assert machine.cache is not None
    rates = dict(machine.rates or {})
    for place, each in rates.items():
        here = [(case, record) for case, record in predicted if case.place == place]
        if any(row_of(case, record, machine).fits is not False for case, record in here):
            steps = [record.prediction.predicted_work for _, record in here]
            if machine.timing_seconds is not None:  # for ratios alone, and not to rank rows
                steps = [step for step in steps if throughput.may_be_timed(step, TIMED, place, each)]
            work = [work for step in steps for work in step]
            rates[place] = throughput.with_calls(each, place, work, machine.cache, machine.timing_seconds)
    return replace(machine, rates=rates)


def of_plan(
    plan: Plan,
    plugins: Plugins,
    names: tuple[str, ...],
    machine: Machine,
    on_case: Callable[[Case], None] = lambda case: None,
) -> list[list[PlanRow]]:
    """Predict all cases of a plan, comparison by comparison."""
    rows = iter(of_cases(plan.cases, plan, plugins, names, machine, on_case))
    return [[next(rows) for _ in comparison.cases] for comparison in plan.comparisons]


def named(cases: Sequence[Case], label: str) -> list[Case]:
    """Return the cases with a label, as tables show it; refuse one that there is not."""
    labels = dict.fromkeys(case.label for case in cases)
    if label not in labels:
        raise Refusal(f"--explain: there is no case '{printable(label)[:80]}' in this plan{nearest(label, labels)}")
    return [case for case in cases if case.label == label]


def with_budget(plan: Plan, budget: int | None) -> Plan:
    """Return a plan with another budget for every case; None leaves each its own.

    Comparisons that differ in their budgets alone become one.
    """
    if budget is None:
        return plan
    update = {"budget_bytes": budget}
    comparisons = (
        Comparison(tuple(case.model_copy(update=update) for case in comparison.cases))
        for comparison in plan.comparisons
    )
    once = {comparison.baseline.comparison_key: comparison for comparison in comparisons}
    return replace(plan, comparisons=tuple(once.values()))


def valid(plugins: Plugins, case: Case) -> bool:
    """Check whether the workload takes the sizes of a case."""
    return refused(plugins, case) is None


def refused(plugins: Plugins, case: Case) -> str | None:
    """Return why the workload does not take the sizes of a case; None where it does."""
    try:
        shape_of(plugins, case)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    except ValueError as error:
        return str(error)
    return None


def taken(row: PlanRow) -> float:
    """Return what to make less: what a row needs, and by how much it is over the limit of the host, where known."""
    return float("inf") if row.need_bytes is None else row.need_bytes + row.over_host_bytes


def need(row: PlanRow) -> str:
    """Write what to keep free for a row whose need is known; where that is more than its arrays, say of what."""
    highest = row.peak_bytes if row.at_most_bytes is None else row.at_most_bytes
    with_context = row.prediction.predicted_driver_bytes is not None and not row.is_within_budget
    of = "" if row.need_bytes == highest else " of the card" if with_context else " reserved"
    return f"{'' if row.at_most_bytes is None else 'at most '}{shown(row.need_bytes or 0)}{of}"


def beyond_host(row: PlanRow) -> str:
    """Write by how much a row on a GPU is too large for the host."""
    taken, limit = row.prediction.predicted_host_bytes or 0, row.host_limit_bytes or 0
    return f"takes {shown(taken)} of the host and is {shown(row.over_host_bytes)} over {shown(limit)}"
