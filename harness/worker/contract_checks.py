"""Hold strategies and workloads to their contract at the probe shape; every broken promise is one sentence.

The task names one case: without strategies its workload is held to the contract, with one strategy that is, with more
their composition is compared to the untouched parts.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from harness import backends
from harness.contract.assembly import assemble, feeds_of, never_called, probe_of, rewritten
from harness.contract.errors import raised
from harness.contract.instruments import digested
from harness.contract.parts import DATA_PARTS, ENDING_PARTS, PART_NAMES, RANK_PARTS
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine.history import SHIPPED
from harness.records import Applied, Case, Record, Task
from harness.verdicts.numerics import UNIT_ROUNDOFF, Outcome
from harness.worker import numerics, ranks
from harness.worker.failures import first_line

UPDATES = 4
EXACT, LOWER = 1e-5, 2e-2
"""How far losses and gradients may lie from the baseline's: in float32, and at least where less is declared."""
DECAY = 1.0
"""The weight decay of every run: by the usual one losses differ less, where an update forgets it, than they may."""
CHEAP, EVERY_PART = "lstm", "jamba"
"""Networks of the temporal workload: the one that costs least, and the one in which every part is called."""
IN_LAYERS = {"linear", "rotary", "mix", "attend", "scan", "feed", "block", "stack"}
DECLARE = "mend it, or declare `precision` or `approximate`"
OF_MODEL = "mend it, or the model, if its `forward` changes buffers or attributes: a block may run twice in a step"
CHANCE = "leave dropout to modules, or give it `training=self.training`, and draw no other random numbers"
IN_THE_TYPE = "make what a layer adds in the type of its hidden states"
"""What to do about a strategy whose answers are others, also on a user's own model, and about a model that changes, or
that is for one type alone."""
PRECISIONS = {"bfloat16": "strategies store parameters", "float64": "answers are compared"}
"""Other types in which a workload trains, and what for."""

Names = tuple[str, ...]
_contracts: list["Contract"] = []


def measure(task: Task, loaded: Plugins, backend: Any) -> Record:
    """Return the broken promises of what the task names, as `faults` in `extra`.

    What a rank raises ends the case, by which the other ranks end as well.
    """
    case = task.case
    contract, name = _contract(loaded, case.ranks), case.place.backend
    names = tuple(applied.name for applied in case.strategies)
    if not names:
        broken = contract.of_workload(case.workload, name)
    elif len(names) == 1:
        broken = contract.of_strategy(names[0], case.workload, name)
    else:
        broken = contract.of_composition(names, case.workload, name)
    faults: list[str] = []
    try:
        faults.extend(broken)
    except Exception as error:  # whatever the plugin raises is its fault
        if ranks.own() is not None:
            raise
        faults.append(f"it raises {raised(error, first_line(str(error)))}")
    return Record(extra={"faults": faults})


def _contract(loaded: Plugins, ranks: int) -> "Contract":
    """Return the contract over these plugins on so many ranks, the same for all such cases of a task."""
    if not _contracts or (_contracts[0].loaded, _contracts[0].ranks) != (loaded, ranks):
        _contracts[:] = [Contract(loaded, ranks)]
    return _contracts[0]


class Contract:
    """The contract over all plugins loaded; what the baselines gave is kept for the next question.

    Strategies that divide a run divide it among `ranks`: in torch this process is one of them, in JAX it has them all.
    """

    def __init__(self, loaded: Plugins, ranks: int = 1) -> None:
        self.loaded, self.ranks = loaded, ranks
        self._outcomes: dict[tuple[Any, ...], Outcome] = {}
        self._consumed: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def case(self, workload: str, backend: str, names: Names = (), network: str = CHEAP, ends: bool = False) -> Case:
        """Return the case in which promises are tried: the probe of a workload, with the strategies' knobs for it.

        With `ends` it is evaluated, saved and resumed after its steps.
        """
        made: Any = self.loaded.workloads[workload]
        wanted = {"network": network} | ({} if "update" in made.lacks else {"weight_decay": DECAY})
        settings: dict[str, Any] = {name: value for name, value in wanted.items() if name in made.shape.model_fields}
        if ends:
            settings["evaluations"] = 2
        case = Case(
            workload=workload,
            shape=made.shape(**settings).model_dump(),
            place=Place(backend, "cpu"),
            corpus="drawn",
            tokenizer="none",
            strategies=tuple(Applied(name=name) for name in names),
            ranks=self.ranks if any(self.loaded.strategies[name].ranks for name in names) else 1,
        )
        return probe_of(self.loaded, case)

    def outcome(
        self, workload: str, backend: str, names: Names = (), network: str = CHEAP, ends: bool = False
    ) -> Outcome:
        """Return the losses of four steps, and of what follows them, and the gradients that the first update got.

        Raises ValueError where a rewritten part was never called.
        """
        key = (workload, backend, names, network, ends)
        if key not in self._outcomes:
            module = backends.load(backend)
            module.start(Place(backend, "cpu"))
            case = self.case(workload, backend, names, network, ends)
            calls: Counter[tuple[str, str]] = Counter()
            reorders = feeds_of(self.loaded, case) == "reordered"
            run = numerics.observer(self.loaded, case, module, calls=calls, reorders=reorders, updates=UPDATES)
            self._outcomes[key] = run(0)
            idle = never_called(calls)
            if idle is not None and not reorders:  # the untouched order was put back
                raise ValueError(idle)
        return self._outcomes[key]

    def consumed(self, workload: str, backend: str, names: Names = ()) -> tuple[str, ...]:
        """Return digests of the batches of an epoch and of the next ones."""
        key = (workload, backend, names)
        if key not in self._consumed:
            digests: list[str] = []
            parts = digested(assemble(self.loaded, self.case(workload, backend, names)), digests)
            windows = parts.windows(parts, parts.source(parts))
            for _ in islice(parts.batches(parts, windows), self._epoch(workload, parts.shape) + UPDATES):
                pass
            self._consumed[key] = tuple(digests)
        return self._consumed[key]

    def _epoch(self, workload: str, shape: Any) -> int:
        """Return how many batches an epoch has; 0 where the workload does not say."""
        extent = self.loaded.workloads[workload].extent
        return 0 if extent is None else (known := extent(shape, None, UPDATES)).count // known.batch

    def of_strategy(self, name: str, workload: str, backend: str) -> Iterator[str]:
        """Yield what a strategy does not keep: its parts, its batches, its answers."""
        strategy = self.loaded.strategies[name]
        yield from self._rewritten(name, workload, backend)
        of_data = bool(strategy.rewrites) and set(strategy.rewrites) <= DATA_PARTS
        if of_data and strategy.feeds == "same":
            yield from self._other_batches((name,), workload, backend)
            return  # the same batches train the same
        padded = self.loaded.workloads[workload].data == "documents"  # in JAX to one size
        one_for_all = backend != "torch" and strategy.on[backend] is strategy.on.get("torch") and not padded
        if of_data and one_for_all and strategy.feeds != "rounded" and backends.absent("torch", "cpu") is None:
            if self.consumed(workload, backend, (name,)) != self.consumed(workload, "torch", (name,)):
                yield f"its batches in {backend} are others than in torch"
            return  # the same function gave the same batches as in torch, where they are trained on
        yield from self.of_composition((name,), workload, backend)

    def of_composition(self, names: Names, workload: str, backend: str) -> Iterator[str]:
        """Yield where strategies, applied left to right, train otherwise than the untouched parts."""
        applied = [self.loaded.strategies[name] for name in names]
        rewrites = {part for strategy in applied for part in strategy.rewrites}
        network = EVERY_PART if IN_LAYERS & rewrites else CHEAP
        ends = any(part in rewrites for part in ENDING_PARTS)
        outcome = self.outcome(workload, backend, names, network, ends)
        if not all(map(math.isfinite, _losses(outcome))):
            yield f"its losses are not finite: {', '.join(map(str, _losses(outcome)))}"
            return
        if any(strategy.approximate for strategy in applied):
            return
        lowered = [4 * UNIT_ROUNDOFF[each.precision] for each in applied if each.precision]
        bound = max(LOWER, *lowered) if lowered else EXACT
        remedy = DECLARE if workload in SHIPPED else OF_MODEL
        yield from _differences(outcome, self.outcome(workload, backend, (), network, ends), bound, remedy=remedy)
        case = self.case(workload, backend, names)
        feeds = feeds_of(self.loaded, case)
        if feeds == "same":
            yield from self._other_batches(names, workload, backend)
        elif feeds == "reordered" and (order := numerics.order(self.loaded, case, Counter())) not in numerics.ORDERS:
            yield order

    def _other_batches(self, names: Names, workload: str, backend: str) -> Iterator[str]:
        if self.consumed(workload, backend, names) != self.consumed(workload, backend):
            yield "its batches are not those of the untouched parts: mend it, or declare what `feeds` they are"

    def _rewritten(self, name: str, workload: str, backend: str) -> Iterator[str]:
        """Yield where a strategy rewrites other parts than it says, or does not say what it holds."""
        strategy = self.loaded.strategies[name]
        case = self.case(workload, backend, (name,), EVERY_PART)
        knobs = case.strategies[0].knobs
        before = assemble(self.loaded, case.model_copy(update={"strategies": ()}))
        after = rewritten(before, strategy, knobs)
        changed = {part for part in PART_NAMES if getattr(before, part) is not getattr(after, part)}
        for part in sorted(changed - set(strategy.rewrites)):
            yield f"it rewrites '{part}', which `rewrites` does not name"
        for part in sorted(set(strategy.rewrites) - changed):
            yield f"`rewrites` names '{part}', which it leaves as it was"
        if (after.place, after.corpus, after.notes) != (before.place, before.corpus, before.notes):
            yield "it changes `place`, `corpus` or `notes`: leave them, and write into the notes that are there"
        if after.shape != before.shape and not strategy.approximate:
            yield "it changes the sizes of the model: declare `approximate=True`"
        if not changed & DATA_PARTS:
            if strategy.feeds != "same" or strategy.data is not None:
                yield "it declares `feeds` or `data`, and rewrites no part of the data"
            return
        extent = self.loaded.workloads[workload].extent
        if strategy.holds is None:
            yield "it rewrites data and does not say what it holds: give `holds(extent, **knobs) -> Holding`"
        elif extent is not None:
            sizes = strategy.holds(extent(before.shape, None, 3), **knobs)
            if not all(isinstance(size, int | None) for name, size in vars(sizes).items() if name != "supposes"):
                yield "`holds` gives sizes that are no whole bytes"

    def of_workload(self, name: str, backend: str) -> Iterator[str]:
        """Yield where a workload has other parts than it says, other batches, or parameters that nobody can recast."""
        made: Any = self.loaded.workloads[name]
        case = self.case(name, backend, network=EVERY_PART)
        parts = assemble(self.loaded, case)
        absent = {part for part in PART_NAMES if getattr(parts, part) is None}
        for part in sorted(absent - set(made.lacks)):
            yield f"the part '{part}' is None, and `lacks` does not name it"
        own_use = {*RANK_PARTS, *ENDING_PARTS} | ({"recur", "scan"} if "network" in case.shape else set())
        for part in sorted(set(made.lacks) - absent - own_use):
            yield f"`lacks` names '{part}', which is there"
        shape = parts.shape
        for size, figure in (("floor", made.floor(shape)), ("tokens_per_step", made.tokens_per_step(shape))):
            if not isinstance(figure, int) or figure < 1:
                yield f"`{size}` gives {figure!r}, and not a whole number above 0"
        source = parts.source(parts)
        windows = parts.windows(parts, source)
        x, y = next(iter(parts.batches(parts, windows)))
        abstract, shapes = made.abstract_batch(shape), (tuple(x.shape), tuple(y.shape))
        if windows.size is None and tuple(tuple(sizes) for sizes, _ in abstract) != shapes:
            yield f"its batches are {shapes[0]} and {shapes[1]}, and `abstract_batch` says {abstract}"
        module = backends.load(backend)
        module.start(Place(backend, "cpu"))
        recast = replace(parts, draw=module.cast(parts.draw, "bfloat16"))
        undrawn = [
            parameter
            for parameter, (_, dtype) in module.arrays(recast.init(recast, recast.source(recast))["params"]).items()
            if dtype != "bfloat16"
        ]
        if undrawn:
            yield f"its parameter '{undrawn[0]}' is not made by `parts.draw`, so it cannot be had in another precision"
        first = self.outcome(name, backend, (), EVERY_PART)
        if not all(map(math.isfinite, _losses(first))):
            yield f"its losses are not finite: {', '.join(map(str, _losses(first)))}"
            return
        self._outcomes.clear()
        again = self.outcome(name, backend, (), EVERY_PART)
        differences = _differences(again, first, 0.0, "the first", CHANCE)
        yield from (f"two runs of one seed differ: {fault}" for fault in differences)
        yield from self._in_other_precisions(case, module)

    def _in_other_precisions(self, case: Case, module: Any) -> Iterator[str]:
        """Yield in which types a workload cannot train: those of `bfloat16`, and of what answers are compared with."""
        for precision, use in PRECISIONS.items():
            wide = module.double() if precision == "float64" else nullcontext()
            try:
                with wide:
                    numerics.observer(self.loaded, case, module, partial(_cast, module, precision), updates=1)(0)
            except Exception as error:
                reason = raised(error, first_line(str(error)))
                yield f"it does not train in {precision}, in which {use}: {reason}; {IN_THE_TYPE}"


def _cast(module: Any, precision: str, inner: Any) -> Any:
    return module.cast(inner, precision)


def _losses(outcome: Outcome) -> tuple[float, ...]:
    """Return the losses of all updates, and that of the evaluation where there is one."""
    return outcome.trajectory if outcome.evaluation is None else (*outcome.trajectory, outcome.evaluation)


def _differences(
    own: Outcome, plain: Outcome, bound: float, of: str = "the untouched parts", remedy: str = DECLARE
) -> Iterator[str]:
    """Yield where losses or gradients lie further apart than the bound, relative to the second: those `of` what."""
    import numpy as np

    losses = zip(_losses(own), _losses(plain), strict=True)
    off = [abs(a - b) / max(abs(b), 1e-30) for a, b in losses]
    farthest = next(filter(math.isnan, off), max(off))  # NaN is in no order, and `max` passes over it
    if not farthest <= bound:
        yield f"its losses lie {farthest:.1e} from those of {of} (at most {bound:.0e}): {remedy}"
    if own.gradients.keys() != plain.gradients.keys():
        odd = sorted(own.gradients.keys() ^ plain.gradients.keys())
        yield f"its gradients are of other parameters: '{odd[0]}' is on one side alone"
        return
    lost = [name for name in plain.gradients if own.gradients[name] is None and plain.gradients[name] is not None]
    if lost:
        yield f"it loses the gradient of '{lost[0]}'"
        return
    pairs = []
    for name, gradient in plain.gradients.items():
        if gradient is not None:
            g, to = np.asarray(own.gradients[name], np.float64), np.asarray(gradient, np.float64)
            if g.shape != to.shape:
                yield f"its gradient of '{name}' has the shape {g.shape}, and not {to.shape}"
                return
            pairs.append((g, to))
    norm = sum(float(np.sum(b**2)) for _, b in pairs) ** 0.5
    away = sum(float(np.sum((a - b) ** 2)) for a, b in pairs) ** 0.5 / max(norm, 1e-30)
    if not away <= bound:
        yield f"its gradients lie {away:.1e} from those of {of} (at most {bound:.0e}): {remedy}"
