"""Foresee the cases of a plan without running any: peak, phase, whether it fits, and the time of a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import environment, throughput
from harness.records import Case, Record
from harness.records.roofline import Rates, seconds
from harness.run import predictions, prepare_data
from harness.suite.plan import Group, Plan
from harness.suite.units import shown

HOST_SHARE = 0.8
"""The share of a machine's memory that a case may take: the process itself and others need some."""
DEVICE_SHARE = 0.95
SHRINKABLE = ("tokens", "batch", "layers")
"""Sizes to halve, in the order in which people give them up, where nothing else helps."""


@dataclass(frozen=True)
class Machine:
    """What cases are held against: bytes of the host and of a GPU, and rates by place; None where not known."""

    host_bytes: int | None = None
    device_bytes: int | None = None
    rates: Mapping[Place, Rates] | None = None

    def limit(self, case: Case) -> int | None:
        """Give the bytes that a case may take: its own budget, or a share of the memory of its place."""
        if case.budget_bytes is not None:
            return case.budget_bytes
        on_host = case.place.device == "cpu"
        whole, share = (self.host_bytes, HOST_SHARE) if on_host else (self.device_bytes, DEVICE_SHARE)
        return None if whole is None else int(whole * share)


def this_machine(places: Iterable[Place], cache: Path) -> Machine:
    """Describe the machine that this runs on; rates that are not known yet are measured."""
    found = {place: Rates.read(throughput.of_place(place, cache)) for place in dict.fromkeys(places)}
    known = {place: each for place, each in found.items() if each is not None}
    return Machine(psutil.virtual_memory().total, environment.gpu_bytes(), known)


@dataclass(frozen=True)
class Foreseen:
    """One case with its prediction; None where there is none, and why."""

    case: Case
    peak_bytes: int | None
    phase: str | None
    floor_bytes: int | None
    limit_bytes: int | None
    seconds: float | None
    reason: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the predicted peak is within the limit; None where one of them is not known."""
        if self.peak_bytes is None or self.limit_bytes is None:
            return None
        return self.peak_bytes <= self.limit_bytes


def foreseen(case: Case, record: Record, machine: Machine) -> Foreseen:
    """Hold a prediction against a machine."""
    known = (machine.rates or {}).get(case.place)
    return Foreseen(
        case=case,
        peak_bytes=record.prediction.predicted_peak_bytes,
        phase=record.prediction.predicted_phase,
        floor_bytes=record.prediction.floor_bytes,
        limit_bytes=machine.limit(case),
        seconds=seconds(record.prediction.predicted_work, known)
        if known and record.prediction.predicted_work
        else None,
        reason=record.missing.get("predicted_peak_bytes") or record.evidence.get("message"),
    )


def foresee(
    cases: Sequence[Case],
    plan: Plan,
    plugins: Plugins,
    names: tuple[str, ...],
    machine: Machine,
    tell: Callable[[Case], None] = lambda case: None,
) -> list[Foreseen]:
    """Predict cases, in their order; the rows that they read are supposed and not made. `tell` hears of each."""
    supposed = {case.group: prepare_data.supposed(plan, case, plugins) for case in cases}
    found: dict[str, Foreseen] = {}
    for case, record in predictions.of_cases(list(cases), supposed, plugins, names):
        found[case.digest()] = foreseen(case, record, machine)
        tell(case)
    return [found[case.digest()] for case in cases]


def of_plan(
    plan: Plan,
    plugins: Plugins,
    names: tuple[str, ...],
    machine: Machine,
    tell: Callable[[Case], None] = lambda case: None,
) -> list[list[Foreseen]]:
    """Foresee all cases of a plan, group by group."""
    found = iter(foresee(plan.cases, plan, plugins, names, machine, tell))
    return [[next(found) for _ in group.cases] for group in plan.groups]


def with_budget(plan: Plan, budget: int | None) -> Plan:
    """Give every case of a plan another budget; None leaves each its own."""
    return plan if budget is None else _changed(plan, {"budget_bytes": budget})


def _changed(plan: Plan, update: dict[str, Any]) -> Plan:
    groups = tuple(Group(tuple(case.model_copy(update=update) for case in group.cases)) for group in plan.groups)
    return Plan(plan.name, plan.path, plan.suite, groups)


@dataclass(frozen=True)
class Remedy:
    """What to change where nothing fits, and what the least peak would be then."""

    change: str
    peak_bytes: int
    fits: bool


def remedies(
    rows: Sequence[Foreseen], plan: Plan, plugins: Plugins, names: tuple[str, ...], machine: Machine
) -> list[Remedy]:
    """Say what would help a group of which nothing fits, the most helpful first: each size halved in the leanest row.

    Empty where something fits, or nothing is known.
    """
    known = [row for row in rows if row.peak_bytes is not None and row.limit_bytes is not None]
    if not known or any(row.fits for row in known):
        return []
    leanest = min(known, key=lambda row: row.peak_bytes or 0)
    halved = {
        name: leanest.case.model_copy(update={"shape": leanest.case.shape | {name: leanest.case.shape[name] // 2}})
        for name in SHRINKABLE
        if isinstance(leanest.case.shape.get(name), int) and leanest.case.shape[name] > 1
    }
    found = foresee(list(halved.values()), plan, plugins, names, machine)
    told = [
        Remedy(f"{name} {row.case.shape[name]:,}", row.peak_bytes, bool(row.fits))
        for name, row in zip(halved, found, strict=True)
        if row.peak_bytes is not None
    ]
    return sorted(told, key=lambda remedy: remedy.peak_bytes)


def shortfall(rows: Sequence[Foreseen]) -> str:
    """Say in one sentence how much the leanest row of a group is too large."""
    known = [row for row in rows if row.peak_bytes is not None and row.limit_bytes is not None]
    leanest = min(known, key=lambda row: row.peak_bytes or 0)
    assert leanest.peak_bytes is not None and leanest.limit_bytes is not None
    over = leanest.peak_bytes - leanest.limit_bytes
    return (
        f"nothing fits: the leanest, {leanest.case.label}, takes {shown(leanest.peak_bytes)} "
        f"and is {shown(over)} over {shown(leanest.limit_bytes)}"
    )
