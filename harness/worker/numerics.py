"""Compare answers at a small ragged shape: every gradient of the first step, and losses and parameters of 20 updates.

The `reference` task runs the untouched parts in float64; the `numerics` task of the baseline runs them twice in the
working dtype. Both leave plain arrays in the run's folder; the `numerics` task of a strategy judges itself by them.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.contract.assembly import assemble, feeds_of, never_called, shape_of
from harness.contract.loop import Ending, training
from harness.contract.parts import Parts
from harness.contract.plugins import Plugins
from harness.contract.toolkit.checkpoints import CheckpointFile
from harness.records import Case, Record, Task
from harness.records.record import Verdict
from harness.verdicts import numerics
from harness.worker import ranks
from harness.worker.failures import first_line

SEEDS = (0, 1, 2)
UPDATES = 20
RESUMED = 2
"""Updates after a run is resumed: what is lost of the moments is in the parameters after one, in the loss after two."""
SETTLED = {"shuffle": False, "learning_rate": 1e-3, "weight_decay": 1.0}
"""Settings of each probe that trains and has them.

The order is looked at apart, later losses are bounded at this rate, and an update that forgets its decay shows at this
one: by the usual one losses differ less than they may.
"""
COMPUTED = ("float32", "float16", "bfloat16")
"""The types in which a whole model can compute; integers and 8 bits are for what is stored or multiplied."""
ORDERS = ("same", "reordered")
"""What the order of two epochs may be, beside the untouched one; anything else is a fault."""
Draw = Callable[[Callable[..., Any]], Callable[..., Any]]


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Produce the yardsticks, or judge a strategy by them, by operations that give the same bits each time.

    Where one has no such form, the others do, and a note says so.
    """
    place = task.case.place
    backend.deterministic(place)
    try:
        return _measured(task, plugins, backend)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        backend.deterministic(place, strict=False)
        record = _measured(task, plugins, backend)
        note = f"equal bits are by chance: {first_line(str(error))}"
        return record.model_copy(update={"notes": {**record.notes, "determinism": note}})


def _measured(task: Task, plugins: Plugins, backend: Any) -> Record:
    folder = Path(task.reference or task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    case = task.case
    if task.kind == "reference":
        reference = _reference(plugins, case, backend)
        for seed in SEEDS:
            numerics.save(folder / f"reference-{seed}.npz", reference(seed))
        return Record()
    calls: Counter[tuple[str, str]] = Counter()
    reorders = feeds_of(plugins, case) == "reordered"
    run = observer(plugins, case, backend, calls=calls, reorders=reorders)
    outcomes = {seed: run(seed) for seed in SEEDS}
    seen = order(plugins, case, calls) if reorders else "same"
    idle = never_called(calls)
    if idle is not None:
        return Record(status="error", evidence={"message": idle})
    if ranks.own():
        return Record()  # the first rank judges for all
    if not case.strategies:
        for seed, outcome in outcomes.items():
            numerics.save(folder / f"baseline-{seed}-0.npz", outcome)
            numerics.save(folder / f"baseline-{seed}-1.npz", run(seed))
    return Record(numerics=_with_order(_judged(plugins, case, backend, outcomes, folder), seen))


def order(plugins: Plugins, case: Case, calls: Counter[tuple[str, str]]) -> str:
    """Compare the order of two epochs with the untouched one: `same`, `reordered`, or what is wrong with it."""
    parts = assemble(plugins, case, calls=calls)
    unshuffled = tuple(each for each in case.strategies if plugins.strategies[each.name].feeds != "reordered")
    plain = assemble(plugins, case.model_copy(update={"strategies": unshuffled}))  # others may round what is fed
    source = plain.source(plain)
    if not any("order" in plugins.strategies[applied.name].rewrites for applied in case.strategies):
        return _batches(parts, plain)
    same = True
    for epoch in range(2):
        own, untouched = (p.order(p, source, epoch)(0, source.count) for p in (parts, plain))
        if sorted(own) != list(range(source.count)):
            return f"an epoch gives {len(set(map(int, own)))} of {source.count} windows, {len(own)} in all"
        same = same and list(own) == list(untouched)
    return "same" if same else "reordered"


def _batches(parts: Parts, plain: Parts) -> str:
    """Compare the windows of an epoch of batches, for strategies that shuffle in a way of their own."""
    windows = plain.windows(plain, plain.source(plain))
    source = windows.source
    known = Counter(_fingerprints(plain, *windows.batch(range(source.count))))
    seen: list[list[str]] = []
    for each in (parts, plain):
        of_epoch = islice(each.batches(each, each.windows(each, each.source(each))), source.count // source.batch)
        seen.append([mark for x, y in of_epoch for mark in _fingerprints(each, x, y)])
    own, untouched = seen
    if len(own) != len(untouched) or Counter(own) - known:
        return f"an epoch gives {len(own)} windows that are not all among the {source.count} of the source, each once"
    return "same" if own == untouched else "reordered"


def _fingerprints(parts: Parts, x: Any, y: Any) -> list[str]:
    """Hash each window of a batch, on whatever device it is."""
    import numpy as np

    x, y = (np.asarray(array.cpu() if hasattr(array, "cpu") else array) for array in parts.transfer(parts, x, y))
    return [hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest() for a, b in zip(x, y, strict=True)]


def _with_order(verdict: Verdict, order: str) -> Verdict:
    """Lower an answer by what its order shows: the gradients were compared in the untouched one."""
    if order not in ORDERS:
        return replace(verdict, verdict="invalid", reason=order)
    if order == "same" or verdict.verdict not in ("bit_exact", "reassociated"):
        return verdict
    reason = f"each epoch has the same windows in another order; on the same batches {verdict.verdict}"
    return replace(verdict, verdict="reordered", reason=reason)


def _judged(plugins: Plugins, case: Case, backend: Any, outcomes: dict[int, numerics.Outcome], folder: Path) -> Verdict:
    declared = [plugins.strategies[applied.name] for applied in case.strategies]
    precisions = [strategy.precision for strategy in declared if strategy.precision]
    precision = max(precisions, key=lambda name: numerics.UNIT_ROUNDOFF.get(name, 1.0), default=None)
    compared = _compared(plugins, case)
    low: Callable[[int], numerics.Outcome] | None = None
    if precision is not None and precision in COMPUTED:
        low = observer(plugins, compared, backend, lambda inner: backend.cast(inner, precision))
    yardsticks = _own_yardsticks(plugins, compared, backend) if compared.strategies else _yardsticks_in(folder)
    layers = getattr(shape_of(plugins, case), "layers", 1)
    verdicts = [
        numerics.compare(
            outcome,
            *yardsticks(seed),
            layers=layers,
            precision=precision,
            approximate=any(strategy.approximate and not strategy.own_baseline for strategy in declared),
            baseline_low=_where_it_runs(low, seed, backend) if low is not None else None,
        )
        for seed, outcome in outcomes.items()
    ]
    verdict = numerics.worst(verdicts)
    return verdict if not compared.strategies else _of_another_model(verdict, compared.label)


def _where_it_runs(low: Callable[[int], numerics.Outcome], seed: int, backend: Any) -> numerics.Outcome | None:
    """Return what the baseline gives at a declared precision; None where an operator of the model has no form in it."""
    try:
        return low(seed)
    except Exception as error:
        if backend.ran_out(error) is not None:
            raise
        return None


def _compared(plugins: Plugins, case: Case) -> Case:
    """Return the case that this one must equal: the untouched one, but with what trains something else."""
    own = tuple(applied for applied in case.strategies if plugins.strategies[applied.name].own_baseline)
    return case.model_copy(update={"strategies": own})


def _yardsticks_in(folder: Path) -> Callable[[int], tuple[numerics.Outcome, ...]]:
    """Return what gives the baseline, the baseline again and the float64 reference of a seed, from the run's folder."""
    return lambda seed: tuple(
        numerics.load(folder / name)
        for name in (f"baseline-{seed}-0.npz", f"baseline-{seed}-1.npz", f"reference-{seed}.npz")
    )


def _own_yardsticks(plugins: Plugins, case: Case, backend: Any) -> Callable[[int], tuple[numerics.Outcome, ...]]:
    """Return what gives the same of a case with strategies, run here."""
    run = observer(plugins, case, backend)
    reference = _reference(plugins, case, backend)
    return lambda seed: (run(seed), run(seed), reference(seed))


def _reference(plugins: Plugins, case: Case, backend: Any) -> Callable[[int], numerics.Outcome]:
    """Return a function from a seed to what a case gives in float64."""

    def draw(inner: Callable[..., Any]) -> Callable[..., Any]:
        return backend.cast(inner, "float64")

    with backend.double():
        observed = observer(plugins, case, backend, draw)

    def run(seed: int) -> numerics.Outcome:
        with backend.double():
            return observed(seed)

    return run


def _of_another_model(verdict: Verdict, label: str) -> Verdict:
    """Call an answer approximate that is right for what is trained, since the baseline trains something else."""
    if verdict.verdict not in ("bit_exact", "reassociated", "lower_precision"):
        return verdict
    reason = f"it trains something else than the baseline; against {label} alone it is {verdict.verdict}"
    return replace(verdict, verdict="approximate", reason=f"{reason}: {verdict.reason}")


def observer(
    plugins: Plugins,
    case: Case,
    backend: Any,
    draw: Draw | None = None,
    calls: Counter[tuple[str, str]] | None = None,
    reorders: bool = False,
    updates: int = UPDATES,
) -> Callable[[int], numerics.Outcome]:
    """Return a function from a seed to what so many updates gave.

    The gradients are those that the first update would get. A workload that has no update is not trained: what its
    state calls `observed` is compared in their place. The steps are prepared once: a seed decides the data and the
    first parameters, nothing within a step. For strategies that reorder, the untouched order is put back, since only
    answers to the same batches compare.
    """
    assembled = partial(_assembled, plugins, draw=draw, calls=calls, reorders=reorders)
    trains = "update" not in plugins.workloads[case.workload].lacks
    step = backend.prepare(assembled(case))
    only_gradients = backend.prepare(replace(assembled(case), update=_put_in_place)) if trains else step

    def run(seed: int) -> numerics.Outcome:
        parts = assembled(case.model_copy(update={"seed": seed}))
        state, losses, evaluation = _trained(backend, parts, step, updates, ends=True)
        parameters = backend.arrays(_gathered(parts, state))
        compared = _gathered(parts, _trained(backend, parts, only_gradients, 1)[0]) if trains else state["observed"]
        gradients = backend.arrays(compared)
        return numerics.Outcome(
            losses[0],
            {name: array for name, (array, _) in gradients.items()},
            {name: dtype for name, (_, dtype) in gradients.items()},
            {name: array for name, (array, _) in parameters.items()},
            tuple(losses),
            evaluation,
        )

    return run


def _assembled(
    plugins: Plugins, case: Case, draw: Draw | None, calls: Counter[tuple[str, str]] | None, reorders: bool
) -> Parts:
    """Assemble the parts of a case as `SETTLED`, in the order of its windows; that of a strategy is put back."""
    if "update" not in plugins.workloads[case.workload].lacks:
        settled = {name: SETTLED.get(name, value) for name, value in case.shape.items()}
        case = case.model_copy(update={"shape": settled})
    parts = assemble(plugins, case, calls=calls, draw=draw)
    return replace(parts, order=assemble(plugins, _untouched(case)).order) if reorders else parts


def _untouched(case: Case) -> Case:
    """Return the case without its strategies."""
    return case.model_copy(update={"strategies": ()})


def _trained(
    backend: Any, parts: Parts, step: Callable[..., Any], steps: int, ends: bool = False
) -> tuple[Any, list[float], float | None]:
    """Return the last state, the losses of all updates and that of the evaluation, None where there is none.

    A whole run that `ends` is evaluated and resumed after its steps, and makes `RESUMED` updates more.
    """
    state, losses, evaluation = None, [], None

    def waited(outputs: Any) -> Any:
        backend.wait(outputs)
        return outputs

    with TemporaryDirectory(prefix="harness-checkpoint-") as folder:
        ends = ends and bool(getattr(parts.shape, "evaluations", 0))
        file = CheckpointFile(Path(folder, "checkpoint.safetensors"), backend.buffer)
        loop = training(parts, step, finish=waited, ending=Ending(steps, file) if ends else None)
        for loss, outputs in islice(loop, steps + ends):
            state = outputs[0]
            losses.append(float(loss))
        if ends:
            evaluation = losses.pop()
            windows = parts.windows(parts, parts.source(parts))
            for x, y in islice(parts.batches(parts, windows), RESUMED):
                state, loss = waited(step(state, x, y))
                losses.append(float(loss))
    return state, losses, evaluation


def _gathered(parts: Parts, state: Any) -> Any:
    """Return the parameters of a state, whole again where ranks divide them."""
    params = state["params"]
    return params if parts.gather_parameters is None else parts.gather_parameters(parts, params)


def _put_in_place(parts: Parts, state: Any, grads: Any) -> Any:
    """Put each gradient where its parameter was.

    So a step returns them however it makes them: all at once, or one by one within a compiled loop, where nothing else
    gets out.
    """
    return {**state, "params": grads}
