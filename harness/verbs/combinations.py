"""Which strategies advice combines, and in which order they go together."""

import itertools
from collections.abc import Iterator, Sequence

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


def members(
    comparison: Comparison,
    plugins: Plugins,
    allowed: Sequence[str],
    everything: bool,
    only: str | None = None,
    ranks: int = 1,
) -> list[Applied]:
    """List the strategies to combine: those of `candidates` whose answers are of the kinds allowed."""
    return [
        applied
        for applied in candidates(comparison, plugins, everything, only, ranks)
        if plugins.strategies[applied.name].declares in ("exact", *allowed)
    ]


def candidates(
    comparison: Comparison, plugins: Plugins, everything: bool, only: str | None = None, ranks: int = 1
) -> list[Applied]:
    """List the strategies that a comparison names, or all of the model's, as far as they are for its place.

    With `only` they are those of rows whose label contains it, and of all those whose name does. `everything` leaves
    out strategies of data, since what a step holds does not depend on them, and those of a CPU's allocator. Those that
    divide the run are for several `ranks` alone.
    """
    considered = _considered(comparison, plugins, everything, only)
    fit = [each for each in considered if _obstacle(each, comparison, plugins) is None]
    return [each for each in fit if ranks > 1 or not divides(each, plugins)]


def _considered(comparison: Comparison, plugins: Plugins, everything: bool, only: str | None) -> list[Applied]:
    rows = [each for each in comparison.cases if only is None or only in each.label]
    named = {str(applied): applied for each in rows for applied in each.strategies}
    if everything:
        on_cpu = comparison.baseline.place.device == "cpu"  # where the allocator is pinned
        named |= {
            name: Applied(name=name)
            for name, strategy in plugins.strategies.items()
            if not DATA_PARTS & set(strategy.rewrites)
            and (strategy.rewrites or not on_cpu)
            and (only is None or only in name)
        }
    return [applied for applied in named.values() if applied.name != CONTROL]


def _obstacle(applied: Applied, comparison: Comparison, plugins: Plugins) -> str | None:
    """Return why a strategy can never be applied in a comparison."""
    return misfit(plugins, comparison.baseline.model_copy(update={"strategies": (applied,)}))


def unfit(comparison: Comparison, plugins: Plugins, only: str | None = None, ranks: int = 1) -> list[str]:
    """Say why strategies that a comparison names are no candidates: of all that need several ranks at once."""
    considered = _considered(comparison, plugins, False, only)
    dividing = dict.fromkeys(each.name for each in considered if ranks == 1 and divides(each, plugins))
    reasons = [_obstacle(each, comparison, plugins) for each in considered if each.name not in dividing]
    of_ranks = f"what needs several ranks, which `ranks` of a suite names: {', '.join(dividing)}" if dividing else None
    return list(filter(None, [of_ranks, *reasons]))


def divides(applied: Applied, plugins: Plugins) -> bool:
    """Check whether a strategy divides the run."""
    return plugins.strategies[applied.name].ranks


def case_of(baseline: Case, combination: Sequence[Applied], plugins: Plugins, ranks: int) -> Case:
    """Return the case of a combination, on as many ranks where it divides the run."""
    count = ranks if any(divides(each, plugins) for each in combination) else 1
    return baseline.model_copy(update={"strategies": tuple(combination), "ranks": count})


def left_out(candidates: Sequence[Applied], plugins: Plugins, allowed: Sequence[str]) -> str:
    """Say which strategies are left out for their answers, and how to allow them; an empty text where none is."""
    kinds: dict[str, list[str]] = {}
    for applied in candidates:
        kind = plugins.strategies[applied.name].declares
        if kind not in ("exact", *allowed):
            kinds.setdefault(kind, []).append(applied.name)
    named = ", ".join(name for kind in kinds.values() for name in dict.fromkeys(kind))
    options = " ".join(f"--allow {kind}" for kind in kinds)
    return named and f"left out, as answers are not exact: {named}; {options} allows them"


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


def listed(comparison: Comparison, applied: Sequence[Applied], plugins: Plugins, ranks: int = 1) -> Comparison | None:
    """Return the comparison with every combination in it; None where there are too many."""
    rows = list(itertools.islice(combinations(applied, plugins, ranks), MOST + 1))
    if len(rows) > MOST:
        return None
    return Comparison(tuple(case_of(comparison.baseline, row, plugins, ranks) for row in rows))


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


def demanded(
    comparison: Comparison,
    plugins: Plugins,
    allowed: Sequence[str],
    everything: bool,
    name: str,
    only: str | None = None,
    ranks: int = 1,
) -> list[Applied]:
    """Return the strategies to combine; raise SuiteError, which names the suite, where there are none.

    So it is on several ranks where none of them divides the run.
    """
    applied = members(comparison, plugins, allowed, everything, only, ranks)
    if not applied or (ranks > 1 and not any(divides(each, plugins) for each in applied)):
        chosen = "" if only is None else f" whose name contains '{printable(only)[:40]}'"
        answers = left_out(candidates(comparison, plugins, everything, only, ranks), plugins, allowed)
        why = "; ".join(filter(None, [answers, *unfit(comparison, plugins, only, ranks)]))
        remedy = "add some" if everything else "add some, or give --all"
        what = "may be combined" if not applied else f"divides the run among {ranks} ranks"
        raise SuiteError(f"{name}: no strategy of it{chosen} {what}: {why or remedy}")
    return applied
