"""What a suite asks for, written out: comparisons of cases."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.contract.place import DEVICES, NAMES, Place
from harness.contract.plugins import nearest
from harness.records import Applied, Case
from harness.suite.bounds import SuiteError
from harness.suite.schema import Suite

PLACES = {f"{name}/{device}" for name in NAMES for device in DEVICES}
CONTRIBUTIONS = "contributions"
"""The key of an entry of `strategies` that asks for all rows which show what each member of a list contributes."""


@dataclass(frozen=True)
class Comparison:
    """The cases that are compared with each other: one workload, shape, place and budget; the baseline first."""

    cases: tuple[Case, ...]

    @property
    def baseline(self) -> Case:
        return self.cases[0]


@dataclass(frozen=True)
class Plan:
    """A suite read against the plugins: its comparisons in order, and where it came from.

    `asked` are the words of a command line that name it, or its model, and the plugins.
    """

    name: str
    path: Path
    suite: Suite
    comparisons: tuple[Comparison, ...]
    asked: str = ""

    @property
    def where(self) -> str:
        """What a sentence names the suite by: its file, or where it was written for a model its name."""
        return str(self.path) if self.path.exists() else self.name

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of the comparisons: of those of the suite a plan may keep some."""
        return tuple(dict.fromkeys(comparison.baseline.place for comparison in self.comparisons))

    @property
    def cases(self) -> list[Case]:
        return [case for comparison in self.comparisons for case in comparison.cases]

    def having(self, wanted: Callable[[Case], bool]) -> "Plan":
        """Return the plan with the wanted cases alone, and the baseline and control of their comparisons."""
        comparisons = []
        for comparison in self.comparisons:
            if any(wanted(case) for case in comparison.cases):
                cases = (case for case in comparison.cases if case.is_baseline or case.is_control or wanted(case))
                comparisons.append(Comparison(tuple(cases)))
        return replace(self, comparisons=tuple(comparisons))


def words(of: Sequence[str], plugins: Sequence[str], rounds: int | None = None) -> str:
    """Write what a command line asks for: `of` names a suite or a model, and `rounds` are in place of the suite's."""
    return shlex.join([*of, *with_options([*(("--plugin", name) for name in plugins), ("--rounds", rounds)])])


def with_options(options: Iterable[tuple[str, object]]) -> list[str]:
    """Return options and their values as words of a command line, without those that have no value."""
    return [word for option, value in options if value is not None for word in (option, str(value))]


def demand_gpu(plan: Plan, is_supposed: bool) -> None:
    """Raise SuiteError where a GPU is supposed and nothing of the plan would be on it."""
    if is_supposed and all(place.device == "cpu" for place in plan.places):
        raise SuiteError(f"{plan.where}: a GPU is named, and no case is on one: name torch/cuda among the places")


def selected(plan: Plan, places: list[str] | None, only: str | None, where: str = "") -> Plan:
    """Return the plan for the places named and the rows whose label contains `only`, with baseline and control.

    Raises SuiteError where there is none, which says `where`: by default in the file of the suite.
    """
    where = where or plan.where
    for place in places or []:
        if place not in plan.suite.places:
            remedy = ": add it to `places`" if place in PLACES else nearest(place, plan.suite.places)
            raise SuiteError(f"{where}: it has no place '{place}'{remedy}")
    comparisons = (
        comparison for comparison in plan.comparisons if not places or str(comparison.baseline.place) in places
    )
    chosen = replace(plan, comparisons=tuple(comparisons))
    if only is None:
        return chosen
    labels = dict.fromkeys(case.label for case in chosen.cases)
    if not any(only in label for label in labels):
        near = nearest(only, labels)
        remedy = near if near.endswith("?") else ": see its list, or `harness list`"
        raise SuiteError(f"{where}: no strategy's name contains '{only}'{remedy}")
    return chosen.having(lambda case: only in case.label)


def contributions(row: tuple[Applied, ...]) -> list[tuple[Applied, ...]]:
    """Return each member alone, the whole without each, and the whole: the rows that show what each contributes."""
    alone = [(member,) for member in row]
    without = [row[:at] + row[at + 1 :] for at in range(len(row))] if len(row) > 2 else []
    return [*alone, *without, row]
