"""What a suite asks for, written out: groups of cases."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.contract.place import Place
from harness.contract.plugins import nearest
from harness.records import Applied, Case
from harness.records.case import CONTROL
from harness.suite.schema import Suite, SuiteError

CONTRIBUTIONS = "contributions"
"""The key of an entry of `strategies` that asks for all rows which show what each member of a list contributes."""


@dataclass(frozen=True)
class Group:
    """The cases that are compared with each other: one workload, shape, place and budget; the baseline first."""

    cases: tuple[Case, ...]

    @property
    def baseline(self) -> Case:
        return self.cases[0]


@dataclass(frozen=True)
class Plan:
    """A suite read against the plugins: its groups in order, and where it came from."""

    name: str
    path: Path
    suite: Suite
    groups: tuple[Group, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the suite, of which a plan may keep some."""
        return tuple(map(Place.parse, self.suite.places))

    @property
    def cases(self) -> list[Case]:
        return [case for group in self.groups for case in group.cases]

    def having(self, wanted: Callable[[Case], bool]) -> "Plan":
        """Keep the cases that are wanted, and of their groups the baseline and the control."""
        groups = []
        for group in self.groups:
            if any(wanted(case) for case in group.cases):
                kept = [case for case in group.cases if case.label in ("baseline", CONTROL) or wanted(case)]
                groups.append(Group(tuple(kept)))
        return Plan(self.name, self.path, self.suite, tuple(groups))


def selected(plan: Plan, places: list[str] | None, only: str | None) -> Plan:
    """Keep the places named and the rows whose label contains `only`; baseline and control always stay."""
    for place in places or []:
        if place not in plan.suite.places:
            raise SuiteError(f"{plan.path}: it has no place '{place}'{nearest(place, plan.suite.places)}")
    here = tuple(group for group in plan.groups if not places or str(group.baseline.place) in places)
    chosen = Plan(plan.name, plan.path, plan.suite, here)
    if only is None:
        return chosen
    if not any(only in case.label for case in chosen.cases):
        raise SuiteError(f"{plan.path}: no strategy's name contains '{only}': see its list, or `harness list`")
    return chosen.having(lambda case: only in case.label)


def contributions(row: tuple[Applied, ...]) -> list[tuple[Applied, ...]]:
    """Give each member alone, the whole without each, and the whole: what shows what each contributes."""
    alone = [(member,) for member in row]
    without = [row[:at] + row[at + 1 :] for at in range(len(row))] if len(row) > 2 else []
    return [*alone, *without, row]
