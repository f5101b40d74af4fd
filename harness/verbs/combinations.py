"""Which strategies advice combines, and in which order they go together."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.contract.parts import DATA_PARTS
from harness.contract.plugins import Plugins, printable
from harness.contract.strategy import Strategy
from harness.records import Applied, Case
from harness.records.case import CONTROL
from harness.run.schedule import conflict, misfit
from harness.suite.bounds import SuiteError
from harness.suite.plan import Comparison, Plan

MOST = 2000
"""Combinations that are all predicted, at most: some minutes of work. Among more of them one is looked for."""


def ranks_of(plan: Plan) -> int:
    """Return among how many ranks each combination divides the run: as many as a suite names, or 1.

    It is 1 where a suite names no number or several.
    """
    ranks = plan.suite.ranks
    return ranks if "ranks" in plan.suite.model_fields_set and isinstance(ranks, int) else 1


@dataclass(frozen=True)
class Choice:
    """Which strategies may be combined: those whose answers are exact, or of the kinds `allowed`.

    They are those of a suite, or of `everything` that is loaded; with `only` those of rows whose label contains it, and
    of everything those whose name does. Those that divide the run are combined on several `ranks` alone, and there
    every combination has one of them.
    """

    plugins: Plugins
    allowed: Sequence[str] = ()
    everything: bool = False
    only: str | None = None
    ranks: int = 1

    def members(self, comparison: Comparison) -> list[Applied]:
        """List the strategies to combine: those of `candidates` whose answers may be used."""
        return [each for each in self.candidates(comparison) if self._kind(each) in ("exact", *self.allowed)]

    def candidates(self, comparison: Comparison) -> list[Applied]:
        """List the strategies that a comparison names, or all of the model's, as far as they are for its place."""
        considered = self._considered(comparison, self.everything)
        fit = [each for each in considered if _obstacle(each, comparison, self.plugins) is None]
        return [each for each in fit if self.ranks > 1 or not divides(each, self.plugins)]

    def demanded(self, comparison: Comparison, name: str) -> list[Applied]:
        """Return the strategies to combine; raise SuiteError, which names the suite, where there are none.

        So it is on several ranks where none of them divides the run.
        """
        applied = self.members(comparison)
        if not applied or (self.ranks > 1 and not any(divides(each, self.plugins) for each in applied)):
            chosen = "" if self.only is None else f" whose name contains '{printable(self.only)[:40]}'"
            why = "; ".join(self.excluded(comparison))
            remedy = "add some" if self.everything else "add some, or give --all"
            what = "may be combined" if not applied else f"divides the run among {self.ranks} ranks"
            raise SuiteError(f"{name}: no strategy of it{chosen} {what}: {why or remedy}")
        return applied

    def excluded(self, comparison: Comparison) -> list[str]:
        """Say which strategies of a comparison are not combined, and why."""
        return list(filter(None, [self._inexact(comparison), *self._unfit(comparison)]))

    def _unfit(self, comparison: Comparison) -> list[str]:
        """Say why strategies that a comparison names are no candidates: of all that need several ranks at once."""
        considered = self._considered(comparison, False)
        dividing = dict.fromkeys(each.name for each in considered if self.ranks == 1 and divides(each, self.plugins))
        reasons = [_obstacle(each, comparison, self.plugins) for each in considered if each.name not in dividing]
        why = "what divides the run, as the suite names no single number of `ranks`"
        several = f"{why}: {', '.join(dividing)}" if dividing else ""
        return list(filter(None, [several, *reasons]))

    def _inexact(self, comparison: Comparison) -> str:
        """Say which candidates are left out for their answers, and how to allow them; an empty text where none is."""
        kinds: dict[str, list[str]] = {}
        for applied in self.candidates(comparison):
            if (kind := self._kind(applied)) not in ("exact", *self.allowed):
                kinds.setdefault(kind, []).append(applied.name)
        named = ", ".join(name for kind in kinds.values() for name in dict.fromkeys(kind))
        options = " ".join(f"--allow {kind}" for kind in kinds)
        return named and f"answers are not exact: {named}; {options} allows them"

    def listed(self, comparison: Comparison, applied: Sequence[Applied]) -> Comparison | None:
        """Return the comparison with every combination of strategies in it; None where there are too many."""
        rows = list(itertools.islice(combinations(applied, self.plugins, self.ranks), MOST + 1))
        if len(rows) > MOST:
            return None
        return Comparison(tuple(case_of(comparison.baseline, row, self.plugins, self.ranks) for row in rows))

    def _kind(self, applied: Applied) -> str:
        """Return what a strategy declares of its answers."""
        return self.plugins.strategies[applied.name].declares

    def _considered(self, comparison: Comparison, everything: bool) -> list[Applied]:
        """List what is named, and of everything what is no strategy of data, on which no step depends.

        Nor is it one of a CPU's allocator.
        """
        rows = [each for each in comparison.cases if self.only is None or self.only in each.label]
        named = {str(applied): applied for each in rows for applied in each.strategies}
        if everything:
            on_cpu = comparison.baseline.place.device == "cpu"  # where the allocator is pinned
            named |= {
                name: Applied(name=name)
                for name, strategy in self.plugins.strategies.items()
                if not DATA_PARTS & set(strategy.rewrites)
                and (strategy.rewrites or not on_cpu)
                and (self.only is None or self.only in name)
            }
        return [applied for applied in named.values() if applied.name != CONTROL]


def _obstacle(applied: Applied, comparison: Comparison, plugins: Plugins) -> str | None:
    """Return why a strategy can never be applied in a comparison."""
    return misfit(plugins, comparison.baseline.model_copy(update={"strategies": (applied,)}))


def divides(applied: Applied, plugins: Plugins) -> bool:
    """Check whether a strategy divides the run."""
    return plugins.strategies[applied.name].ranks


def case_of(baseline: Case, combination: Sequence[Applied], plugins: Plugins, ranks: int) -> Case:
    """Return the case of a combination, on as many ranks where it divides the run."""
    count = ranks if any(divides(each, plugins) for each in combination) else 1
    return baseline.model_copy(update={"strategies": tuple(combination), "ranks": count})


def combinations(members: Sequence[Applied], plugins: Plugins, ranks: int = 1) -> Iterator[tuple[Applied, ...]]:
    """Yield every subset whose members go together, in an order in which none hides a part that another rewrites.

    On several `ranks` each but the empty one divides the run.
    """
    numbers = range(len(members))
    pairs = itertools.combinations(numbers, 2)
    together = {(a, b) for a, b in pairs if ordered((members[a], members[b]), plugins) is not None}

    def subsets(chosen: tuple[int, ...], rest: Sequence[int]) -> Iterator[tuple[Applied, ...]]:
        if (row := ordered([members[at] for at in sorted(chosen)], plugins)) is None:
            return
        yield row
        for number, at in enumerate(rest, start=1):
            fit = [other for other in rest[number:] if (min(at, other), max(at, other)) in together]
            yield from subsets((*chosen, at), fit)

    if ranks == 1:
        yield from subsets((), numbers)
        return
    yield ()
    dividing = [at for at in numbers if divides(members[at], plugins)]
    for number, at in enumerate(dividing, start=1):
        others = [other for other in numbers if other not in dividing[:number]]
        yield from subsets((at,), [other for other in others if (min(at, other), max(at, other)) in together])


def ordered(members: Sequence[Applied], plugins: Plugins) -> tuple[Applied, ...] | None:
    """Return strategies in the order in which they go together, as listed where they may; None where they do not."""
    if len({applied.name for applied in members}) < len(members):
        return None
    rest = list(members)
    ordered: list[Applied] = []
    while rest:
        strategies = [plugins.strategies[applied.name] for applied in rest]
        first = next((at for at, one in enumerate(strategies) if not _is_after(one, strategies)), None)
        if first is None:
            return None
        ordered.append(rest.pop(first))
    return None if conflict([plugins.strategies[applied.name] for applied in ordered]) else tuple(ordered)


def _is_after(strategy: Strategy, others: Sequence[Strategy]) -> bool:
    """Check whether a strategy has to be named after one of some others: it would be hidden, or says so itself."""
    return any(
        other.hides.intersection(strategy.rewrites) or f"before {other.name}" in strategy.conflicts
        for other in others
        if other is not strategy
    )
