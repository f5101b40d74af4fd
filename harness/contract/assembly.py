"""From a case to its parts: the untouched ones of the workload, rewritten from left to right."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.contract.data import FEEDS
from harness.contract.instruments import counted
from harness.contract.parts import Parts
from harness.contract.plugins import Plugins
from harness.contract.strategy import Strategy
from harness.records import Case
from harness.records.task import DocumentFile, FrameFile, TokenFile
from harness.refusal import Refusal

Calls = Counter[tuple[str, str]]


def shape_of(plugins: Plugins, case: Case) -> Any:
    """Read the shape of a case as the workload's own model."""
    return plugins.workloads[case.workload].shape.model_validate(case.shape)  # type: ignore[attr-defined]


def assemble(
    plugins: Plugins,
    case: Case,
    *,
    shape: Any = None,
    corpus: DocumentFile | TokenFile | FrameFile | None = None,
    calls: Calls | None = None,
    draw: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Parts:
    """Build the parts of a case.

    `shape` replaces the case's own, `draw` wraps the untouched drawing of parameters (so that strategies act upon the
    wrapped one), `calls` counts how often each rewritten part is called.
    """
    place = case.place
    workload = plugins.workloads[case.workload]
    parts = workload.on[place.backend](shape or shape_of(plugins, case), place, corpus, case.seed)
    parts = replace(parts, ranks=case.ranks)
    if draw is not None:
        parts = replace(parts, draw=draw(parts.draw))
    for applied in case.strategies:
        strategy = plugins.strategies[applied.name]
        parts = rewritten(parts, strategy, applied.knobs)
        if calls is not None:
            parts = counted(parts, strategy, calls)
    return parts


def rewritten(parts: Parts, strategy: Strategy, knobs: Mapping[str, Any]) -> Parts:
    """Apply a strategy; raise Refusal where it returns no parts."""
    returned = strategy.on[parts.place.backend](parts, **knobs)
    if not isinstance(returned, Parts):
        what = "nothing" if returned is None else f"a {type(returned).__name__}"
        raise Refusal(
            f"'{strategy.name}' returns {what} for {parts.place.backend}: return the parts, as by `replace(parts, ...)`"
        )
    return returned


def feeds_of(plugins: Plugins, case: Case) -> str:
    """Return how far the batches of a case may differ from the baseline's: the widest that its strategies declare."""
    declared = [plugins.strategies[applied.name].feeds for applied in case.strategies]
    return max(declared, key=FEEDS.index, default="same")


def never_called(calls: Calls) -> str | None:
    """Return which rewritten part was never called, if any: that strategy was not active.

    Of several strategies that divide the batch it is one that does.
    """
    shared = any(count for (_, part), count in calls.items() if part == "shard_batch")
    idle = sorted(key for key, count in calls.items() if count == 0 and not (shared and key[1] == "shard_batch"))
    if not idle:
        return None
    strategy, part = idle[0]
    others = [name for (name, other), count in calls.items() if other == part and count]  # those that replaced it
    why = f"'{others[0]}' replaced it: name it after that, or leave one out" if others else "nothing here uses it"
    return f"'{strategy}' rewrote '{part}', but it was never called: {why}"


def environment_of(plugins: Plugins, case: Case) -> dict[str, str]:
    """Return the variables that the strategies of a case set for the process that trains."""
    strategies = (plugins.strategies[applied.name] for applied in case.strategies)
    return {name: value for strategy in strategies for name, value in strategy.environment.items()}


def probe_of(plugins: Plugins, case: Case) -> Case:
    """Reduce a case to the one at which its answer is compared; cases that differ in size alone share it."""
    workload = plugins.workloads[case.workload]
    shape = workload.probe(shape_of(plugins, case))
    return with_probe_knobs(plugins, case, shape).model_copy(
        update={
            "shape": shape.model_dump(),
            "corpus": "drawn",
            "tokenizer": "none",
            "budget_bytes": None,
        }
    )


def with_probe_knobs(plugins: Plugins, case: Case, small: Any) -> Case:
    """Set the knobs that count rows to what suits a small shape, so that there too a chunk is not the whole."""
    shape = shape_of(plugins, case)
    strategies = (
        applied.model_copy(update={"knobs": plugins.strategies[applied.name].probed(applied.knobs, shape, small)})
        for applied in case.strategies
    )
    return case.model_copy(update={"strategies": tuple(strategies)})
