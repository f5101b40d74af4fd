"""Check a plugin: what it says of itself, what it does in workers of its own, and what its instruments cost."""

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from harness import backends
from harness.contract.data import DATA, FEEDS
from harness.contract.parts import PART_NAMES
from harness.contract.place import NAMES, Place
from harness.contract.plugins import ALIKE, Plugins, nearest
from harness.contract.strategy import Strategy
from harness.contract.workload import Workload
from harness.machine import facts
from harness.records import Applied, Case, Kind, Record, Task
from harness.run import runner, template
from harness.run.schedule import conflict
from harness.suite.reader import PLACES
from harness.verdicts.numerics import UNIT_ROUNDOFF
from harness.verdicts.remarks import failure

FRAMEWORKS = ("torch", "jax", "numpy", "triton", "tensorflow")
HOOKS = ("harness_strategies", "harness_workloads", "harness_measure")
TUPLES = ("calls", "needs")
DICTS = ("excludes", "conflicts", "probe", "scaled", "alone", "environment")
"""Fields of a strategy, by what they are; those of `TUPLES` hold texts."""
RANKS = 2
"""Ranks on which a strategy is tried that divides the run."""
NEIGHBOURS = ("checkpoint", "fused_loss")
"""What a strategy must compose with in each order that both allow, and what must apply to a workload."""
LONGEST = 120
"""Characters of a summary."""
DEADLINE = 900.0
"""Seconds that one trial may take."""
OF_RANKS = 300.0
"""Seconds that one on ranks may: one that waits for another would wait for ever."""
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
        if faults := tuple(_uncalled(loaded, name)):
            findings.append(Finding(f"plugin '{name}'", faults=faults))
        strategies = [each.name for each in _offered(loaded, name, "harness_strategies")]
        workloads = [each.name for each in _offered(loaded, name, "harness_workloads")]
        instruments = _implemented(loaded, name, "harness_measure")
        if not faults and not strategies and not workloads and not instruments:
            findings.append(Finding(f"plugin '{name}'", faults=("it offers nothing: return what it is to offer",)))
        for strategy in strategies:
            own = loaded.strategies[strategy]
            unknown = _misspelt(own, loaded)
            findings.append(Finding(f"strategy '{strategy}'", faults=(*described(own), *unknown)))
            if not any(_misformed(own)):
                findings += _of_strategy(loaded, strategy, extra, log)
        for workload in workloads:
            findings += _of_workload(loaded, workload, extra, log)
        findings += [_of_instrument(loaded, implementation, extra, log) for implementation in instruments]
    return findings


def _implemented(loaded: Plugins, name: str, hook: str) -> list[Any]:
    """Return what a plugin implements of a hook."""
    return [each for each in getattr(loaded.manager.hook, hook).get_hookimpls() if each.plugin_name == name]


def _offered(loaded: Plugins, name: str, hook: str) -> list[Any]:
    """Return what a plugin returns for a hook."""
    return [item for implementation in _implemented(loaded, name, hook) for item in implementation.function()]


def _uncalled(loaded: Plugins, name: str) -> Iterator[str]:
    """Yield which functions of a plugin nothing calls, though they look like hooks; or that it has nothing like one."""
    module = loaded.manager.get_plugin(name)
    marked = {hook.name for hook in loaded.manager.get_hookcallers(module) or ()}
    unmarked = [hook for hook in HOOKS if hasattr(module, hook) and hook not in marked]
    for hook in sorted(marked - set(HOOKS)):
        yield f"there is no hook '{hook}'{nearest(hook, HOOKS)}"
    for hook in unmarked:
        yield f"nothing calls its function '{hook}': decorate it with @hookimpl"
    if not marked and not unmarked:
        yield "it implements no hook: decorate harness_strategies, harness_workloads or harness_measure with @hookimpl"


def _misformed(strategy: Strategy) -> Iterator[str]:
    """Yield which fields of a strategy are of another kind than they are read as."""
    for name in TUPLES:
        if isinstance(value := getattr(strategy, name), str):
            yield f"`{name}` is a text: make it a tuple, ('{value}',)"
        elif not isinstance(value, Collection):
            yield f"`{name}` is a {type(value).__name__}: make it a tuple"
    for name in DICTS:
        if not isinstance(value := getattr(strategy, name), Mapping):
            yield f"`{name}` is a {type(value).__name__}: make it a dict"


def described(strategy: Strategy) -> Iterator[str]:
    """Yield what is wrong with what a strategy says of itself."""
    if wrong := list(_misformed(strategy)):
        yield from wrong
        return
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
    first, *others = [replace(strategy, on={backend: form}).knobs for backend, form in strategy.on.items()] or [{}]
    if any(other != first for other in others):
        yield f"its knobs for {' and '.join(strategy.on)} differ: give them the same names, types and defaults"
    for name, value in strategy.probe.items():
        if name not in strategy.knobs:
            yield f"`probe` sets '{name}', which is no knob"
        elif type(value) is not strategy.knobs[name].type:
            yield f"the probe value of '{name}' is no {strategy.knobs[name].type.__name__}"
    for name in strategy.scaled:
        if name not in strategy.knobs or name in strategy.probe:
            yield f"`scaled` has '{name}', which is no knob, or which `probe` sets already"
    for name in strategy.alone:
        if name not in strategy.knobs:
            yield f"`alone` names '{name}', which is no knob"
    for place in strategy.excludes:
        if place not in PLACES:
            yield f"`excludes` names '{place}', which is no place: use {', '.join(PLACES)}"
    if strategy.precision is not None and strategy.precision not in UNIT_ROUNDOFF:
        yield f"`precision` is {strategy.precision!r}: use one of {', '.join(UNIT_ROUNDOFF)}"
    if unknown := [part for part in strategy.calls if part not in PART_NAMES]:
        yield f"`calls` names '{unknown[0]}', which is no part"
    if strategy.feeds not in FEEDS or strategy.data not in (None, *DATA):
        yield f"`feeds` is one of {', '.join(FEEDS)}, and `data` is {', '.join(DATA)} or None"
    if strategy.feeds == "other" and not strategy.approximate:
        yield "it feeds other batches, which give another answer: declare `approximate=True`"
    if strategy.feeds == "rounded" and not strategy.precision:
        yield "it feeds rounded batches: declare their `precision`"


def _misspelt(strategy: Strategy, loaded: Plugins) -> Iterator[str]:
    """Yield which names in `conflicts` are nearly those of a strategy; others may be of plugins that are absent."""
    if any(_misformed(strategy)):
        return
    known = {*loaded.strategies, *loaded.aliases}
    for key in strategy.conflicts:
        order, _, name = key.rpartition(" ")
        if order not in ("", "before"):
            yield f"`conflicts` has '{key}': write 'NAME' or 'before NAME'"
        elif name not in known and difflib.get_close_matches(name, known, cutoff=ALIKE):
            yield f"`conflicts` names '{name}', which is no strategy{nearest(name, known, ALIKE)}"


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


def _sized(workload: Workload) -> Iterator[str]:
    """Yield what is wrong with the sizes at which a workload is tried."""
    model: Any = workload.shape
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        yield "`shape` is no pydantic model: make it a subclass of `harness.Sizes`"
        return
    sizes = model.model_fields
    if required := [name for name, size in sizes.items() if size.is_required()]:
        yield f"its size '{required[0]}' has no default, at which it would be tried: give it one"
        return
    strange: list[str] = []
    with suppress(Exception):  # the trials say what it raises
        small = vars(workload.probe(model()))
        strange = [name for name in small if name not in sizes and not hasattr(model, name)]
    if strange:
        yield f"its small sizes name '{strange[0]}', which is no size{nearest(strange[0], sizes)}"


def _orders(loaded: Plugins, name: str, other: str) -> list[tuple[str, str]]:
    """Return the orders in which two strategies go together, as they declare."""
    pairs = ((name, other), (other, name))
    return [pair for pair in pairs if conflict([loaded.strategies[each] for each in pair]) is None]


def _of_workload(loaded: Plugins, name: str, extra: Sequence[str], log: Log) -> Iterator[Finding]:
    workload = loaded.workloads[name]
    if faults := tuple(_sized(workload)):
        yield Finding(f"workload '{name}'", faults=faults)
        return
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
    log(f"{what} on {cases[0].place.backend}: {len(cases)} trial{'s' if len(cases) > 1 else ''}")
    known: set[tuple[str, ...]] = set()
    for number, (case, record) in enumerate(zip(cases, _run("contract", cases, extra), strict=True), start=1):
        where = f"{case.workload} on {case.place.backend}"
        if len(case.strategies) > 1 or (case.strategies and what.startswith("workload")):
            where += f", {case.label}"
        elif case.ranks > 1:
            where += f" on {case.ranks} ranks"
        if record.status == "unsupported":
            yield Finding(what, where, untested=str(record.evidence.get("message", "")))
            continue
        faults = tuple(map(str, record.extra.get("faults", ()))) if record.status == "ok" else (_ended(record),)
        if faults not in known:  # one fault may end each trial
            known |= {faults} - {()}
            yield Finding(what, where, faults)
        if record.origin.worker_seconds is None and (left := len(cases) - number):  # its worker ended with it
            more = f"{left} more trial{'s' if left > 1 else ''} on {case.place.backend}"
            yield Finding(what, more, untested="the trial before ended its worker")
            return


def _ended(record: Record) -> str:
    said = "message" in record.evidence
    reason = failure(record) if said else record.evidence.get("stderr_tail") or "it wrote nothing"
    if record.status == "timeout" and record.case is not None and record.case.ranks > 1:
        reason += "; a rank may wait in a collective that another does not call"
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
    deadline = OF_RANKS if task.case.ranks > 1 else DEADLINE
    return runner.run(task, facts.threads() if kind == "memory" else 1, deadline)
