"""Check a plugin: what it says of itself, what it does in workers of its own, and what its instruments cost."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness import backends
from harness.contract.data import DATA, FEEDS
from harness.contract.parts import PART_NAMES
from harness.contract.place import NAMES, Place
from harness.contract.plugins import Plugins
from harness.contract.strategy import Strategy
from harness.machine import facts
from harness.records import Applied, Case, Kind, Record, Task
from harness.run import runner, template
from harness.run.schedule import conflict

FRAMEWORKS = ("torch", "jax", "numpy", "triton", "tensorflow")
RANKS = 2
"""Ranks on which a strategy is tried that divides the run."""
NEIGHBOURS = ("checkpoint", "fused_loss")
"""What a strategy must compose with in each order that both allow, and what must apply to a workload."""
LONGEST = 120
"""Characters of a summary."""
DEADLINE = 900.0
"""Seconds that one worker may take."""
MIB = 1 << 20
LIGHT = MIB
"""What an instrument may add to the peak that it watches."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """What one trial in one place showed: broken promises, or why it could not be made."""

    what: str
    where: str = ""
    faults: tuple[str, ...] = ()
    untested: str = ""


@template.forking()
def check(loaded: Plugins, names: Sequence[str], extra: Sequence[str], log: Log = lambda text: None) -> list[Finding]:
    """Check all that the plugins named offer; `extra` are those to load in workers beside the installed ones."""
    findings = []
    for name in names:
        module = loaded.manager.get_plugin(name)
        strategies = [each.name for each in getattr(module, "harness_strategies", list)()]
        workloads = [each.name for each in getattr(module, "harness_workloads", list)()]
        instruments = [
            implementation
            for implementation in loaded.manager.hook.harness_measure.get_hookimpls()
            if implementation.plugin_name == name
        ]
        if not strategies and not workloads and not instruments:
            hooks = "harness_strategies, harness_workloads or harness_measure"
            fault = f"it implements no hook: decorate {hooks} with @hookimpl"
            findings.append(Finding(f"plugin '{name}'", faults=(fault,)))
        for strategy in strategies:
            findings.append(Finding(f"strategy '{strategy}'", faults=tuple(described(loaded.strategies[strategy]))))
            findings += _of_strategy(loaded, strategy, extra, log)
        for workload in workloads:
            findings += _of_workload(loaded, workload, extra, log)
        findings += [_of_instrument(loaded, implementation, extra, log) for implementation in instruments]
    return findings


def described(strategy: Strategy) -> Iterator[str]:
    """Yield what is wrong with what a strategy says of itself."""
    summary = strategy.summary
    if len(summary) > LONGEST:
        yield f"the first line of `about` has {len(summary)} characters: describe in {LONGEST} what it keeps and pays"
    if not summary.endswith(".") or ". " in summary:
        yield "the first line of `about` is not one sentence"
    for knob in strategy.knobs.values():
        if knob.type not in (bool, int, float, str):
            yield f"the knob '{knob.name}' is a {knob.type.__name__}: use bool, int, float or str"
        elif type(knob.default) is not knob.type:
            yield f"the default of the knob '{knob.name}' is no {knob.type.__name__}"
    for name, value in strategy.probe.items():
        if name not in strategy.knobs:
            yield f"`probe` sets '{name}', which is no knob"
        elif type(value) is not strategy.knobs[name].type:
            yield f"the probe value of '{name}' is no {strategy.knobs[name].type.__name__}"
    for name in strategy.scaled:
        if name not in strategy.knobs or name in strategy.probe:
            yield f"`scaled` has '{name}', which is no knob, or which `probe` sets already"
    if unknown := [part for part in strategy.calls if part not in PART_NAMES]:
        yield f"`calls` names '{unknown[0]}', which is no part"
    if strategy.feeds not in FEEDS or strategy.data not in (None, *DATA):
        yield f"`feeds` is one of {', '.join(FEEDS)}, and `data` is {', '.join(DATA)} or None"
    if strategy.feeds == "other" and not strategy.approximate:
        yield "it feeds other batches, which give another answer: declare `approximate=True`"
    if strategy.feeds == "rounded" and not strategy.precision:
        yield "it feeds rounded batches: declare their `precision`"


def _of_strategy(loaded: Plugins, name: str, extra: Sequence[str], log: Log) -> Iterator[Finding]:
    strategy, obstacles, tried = loaded.strategies[name], [], False
    for backend in strategy.on:
        cases = []
        for workload in loaded.workloads.values():
            place = Place(backend, "cpu")
            if backend not in workload.on:
                continue
            if (reason := strategy.obstacle(place, workload) or backends.absent(backend, "cpu")) is not None:
                obstacles.append(reason)
                continue
            cases.append(_case(loaded, workload.name, backend, (name,)))
            if workload.name == "decoder":
                others = (each for each in NEIGHBOURS if each != name and each in loaded.strategies)
                fitting = (each for each in others if not loaded.strategies[each].obstacle(place, workload))
                pairs = next(filter(None, (_orders(loaded, name, each) for each in fitting)), [])
                cases += [_case(loaded, workload.name, backend, pair) for pair in pairs]
        tried = tried or bool(cases)
        yield from _tried(f"strategy '{name}'", cases, extra, log)
    if not tried:
        yield Finding(f"strategy '{name}'", untested=obstacles[0] if obstacles else "it is for no backend")


def _orders(loaded: Plugins, name: str, other: str) -> list[tuple[str, str]]:
    """Return the orders in which two strategies go together, as they declare."""
    pairs = ((name, other), (other, name))
    return [pair for pair in pairs if conflict([loaded.strategies[each] for each in pair]) is None]


def _of_workload(loaded: Plugins, name: str, extra: Sequence[str], log: Log) -> Iterator[Finding]:
    workload = loaded.workloads[name]
    for backend in workload.on:
        if (reason := backends.absent(backend, "cpu")) is not None:
            yield Finding(f"workload '{name}'", backend, untested=reason)
            continue
        fitting = (each for each in NEIGHBOURS if each in loaded.strategies)
        place = Place(backend, "cpu")
        names = [(), *((each,) for each in fitting if not loaded.strategies[each].obstacle(place, workload))]
        cases = [_case(loaded, name, backend, each) for each in names]
        yield from _tried(f"workload '{name}'", cases, extra, log)


def _case(loaded: Plugins, workload: str, backend: str, names: tuple[str, ...]) -> Case:
    """Return a case without sizes, which the worker chooses."""
    strategies = tuple(Applied(name=name) for name in names)
    return Case(
        workload=workload,
        shape={},
        place=Place(backend, "cpu"),
        corpus="drawn",
        tokenizer="none",
        strategies=strategies,
        ranks=RANKS if any(loaded.strategies[name].ranks for name in names) else 1,
    )


def _tried(what: str, cases: Sequence[Case], extra: Sequence[str], log: Log) -> Iterator[Finding]:
    """Try cases of one backend in one worker, and yield a finding for each."""
    if not cases:
        return
    log(f"{what} on {cases[0].place.backend}: {len(cases)} trials")
    for case, record in zip(cases, _run("contract", cases, extra), strict=True):
        where = f"{case.workload} on {case.place.backend}"
        if len(case.strategies) > 1 or (case.strategies and what.startswith("workload")):
            where += f", {case.label}"
        if record.status == "unsupported":
            yield Finding(what, where, untested=str(record.evidence.get("message", "")))
        elif record.status != "ok":
            yield Finding(what, where, (_ended(record),))
        else:
            yield Finding(what, where, tuple(map(str, record.extra.get("faults", ()))))


def _ended(record: Record) -> str:
    reason = record.evidence.get("message") or record.evidence.get("stderr_tail") or "it wrote nothing"
    return f"its worker ended with {record.status}: {reason}"


def _of_instrument(loaded: Plugins, implementation: object, extra: Sequence[str], log: Log) -> Finding:
    """Measure a tiny run, and compare what the instrument returned with what it was passed."""
    what = "instrument"
    if not (getattr(implementation, "wrapper", False) or getattr(implementation, "hookwrapper", False)):
        fault = "harness_measure takes the measuring over: give it @hookimpl(wrapper=True) and yield for the record"
        return Finding(what, faults=(fault,))
    backend = next((name for name in NAMES if backends.absent(name, "cpu") is None), None)
    if backend is None:
        return Finding(what, untested="neither torch nor JAX is installed")
    workload = loaded.workloads["decoder"]
    shape = workload.shape.model_validate(dict(workload.presets["tiny"]))  # type: ignore[attr-defined]
    case = _case(loaded, "decoder", backend, ()).model_copy(update={"shape": shape.model_dump()})
    log(f"{what} on {backend}: one run watched")
    (record,) = _run("memory", [case], extra)
    if record.status != "ok":
        return Finding(what, backend, (_ended(record),))
    faults = []
    if not record.extra:
        faults.append("it adds nothing to `extra` of the record")
    if record.memory.peak_host_bytes is None or not record.memory.phases or not record.memory.losses:
        faults.append("it loses figures of the record: return `record.model_copy(update={'extra': ...})`")
    elif extra:
        (plain,) = _run("memory", [case], ())
        added = record.memory.peak_host_bytes - (plain.memory.peak_host_bytes or 0)
        if plain.status == "ok" and added > LIGHT:
            faults.append(f"it adds {added / MIB:.1f} MiB to the peak that it watches: keep less, or write to a file")
    return Finding(what, backend, tuple(faults))


def _run(kind: Kind, cases: Sequence[Case], extra: Sequence[str]) -> list[Record]:
    task = Task(
        kind=kind,
        cases=tuple(cases),
        run_id=f"check-{os.getpid()}",
        parent=os.getpid(),
        folder="",
        plugins=tuple(extra),
    )
    return runner.run(task, facts.threads() if kind == "memory" else 1, DEADLINE)
