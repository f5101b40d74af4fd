"""Predict the peak of a case without running it: the step on abstract arrays, the data from what strategies declare."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import backends
from harness.backends import Batch, Incomplete, Unavailable
from harness.contract.assembly import assemble, environment_of, never_called, shape_of
from harness.contract.data import Extent, Holding
from harness.contract.parts import DATA_PARTS, ENDING_PARTS, Parts
from harness.contract.plugins import Plugins
from harness.contract.strategy import DECLARED, Unpredictable
from harness.machine import page_faults
from harness.records import Case, Phase, Prediction, Record, Task
from harness.records.forecast import Forecast, largest
from harness.records.roofline import by_intensity
from harness.verdicts import bound
from harness.worker import batch_sizes, notes, ranks
from harness.worker.failures import first_line, is_refusal, origin

GUESSED = "a step asks for the value of a number, which was taken to be 1 or true"
HOST_PHASES = ("source", "windows", "batches")
"""Phases whose peak strategies of data declare."""
NOT_PREDICTED = DATA_PARTS | {"draw", "gather_parameters", *ENDING_PARTS}
"""Parts that a prediction has no call for, or not always; the others a step must call."""


class Host(NamedTuple):
    """What strategies of data declare: the peak of each host phase, what stays in the steps, and what they suppose.

    The kernel may let `reclaimable` bytes be resident beside it.
    """

    peaks: dict[str, int]
    resident: int
    supposes: tuple[str, ...] = ()
    reclaimable: int = 0

    def beside(self, traced: Mapping[str, int]) -> dict[str, int]:
        """Return the peaks with what lives in the run while a batch is fetched: all its state."""
        if "batches" not in self.peaks:
            return self.peaks
        living = traced.get("batches", self.resident)
        return {**self.peaks, "batches": living + self.peaks["batches"] - self.resident}

    def shared(self, ranks: int) -> "Host":
        """Return the share of each of so many ranks that are devices of one process."""
        peaks = {name: peak // ranks for name, peak in self.peaks.items()}
        return Host(peaks, self.resident // ranks, self.supposes, self.reclaimable // ranks)


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Return the predicted peak of a rank, its phase and the floor.

    A case that cannot be predicted says why, with the phases of its data where these could be.
    """
    case, place = task.case, task.case.place
    workload = plugins.workloads[case.workload]
    shape = shape_of(plugins, case)
    declared = (plugins.strategies[applied.name].declares for applied in case.strategies)
    known = Prediction(declared_answer=max(declared, key=DECLARED.index, default=DECLARED[0]))
    built: list[Parts] = []
    calls: Counter[tuple[str, str]] = Counter()

    def draw(inner: Callable[..., Any]) -> Callable[..., Any]:
        return backend.abstract_draw

    def build() -> Parts:
        built.append(assemble(plugins, case, corpus=task.corpus, draw=draw, calls=calls))
        return built[-1]

    host = Host({}, 0)
    try:
        known = known.model_copy(
            update={
                "floor_bytes": workload.floor(shape) // case.ranks,
                "parameters": workload.parameters(shape) if workload.parameters is not None else None,
            }
        )
        extent = workload.extent(shape, task.corpus, task.steps) if workload.extent else None
        if extent is not None:
            processes = backends.processes(place.backend, case.ranks)
            extent = replace(extent, backend=place.backend, around=_around(task, plugins), processes=processes)
        if place.device == "cpu":
            host = host_peaks(plugins, case, extent).shared(ranks.in_process(task))
        environment = environment_of(plugins, case)
        batch = _batch(task, plugins, backend)
        forecast = backend.predict(build, place, batch, host.resident, task.steps, case.ranks, environment)
    except Exception as error:
        explained = isinstance(error, Unpredictable | Unavailable | Incomplete)
        reason = str(error) if explained else _reason(error)
        ended = host.peaks | (error.peaks if isinstance(error, Incomplete) else {})
        raised = None if explained else reason
        in_part = known.model_copy(update={"predicted_phases": _phases(ended), "error": raised})
        return Record(missing={"predicted_peak_bytes": reason}, prediction=in_part)
    if (idle := never_called(Counter({key: n for key, n in calls.items() if key[1] not in NOT_PREDICTED}))) is not None:
        return Record(missing={"predicted_peak_bytes": idle}, prediction=known)
    supposed = "; ".join((*host.supposes, *((GUESSED,) if forecast.supposed else ())))
    figures = known.model_copy(update=_figures(task, plugins, host, forecast))
    remarks = {"prediction": supposed} if supposed else {}
    if forecast.target:
        remarks["gpu"] = f"predicted for one {forecast.target}, whichever runs it"
    return Record(notes=remarks, extra=_numbers(built), prediction=figures)


def _reason(error: Exception) -> str:
    """Return what an error says; its kind, unless it is a refusal; and where in the code of a plugin it came from."""
    line = origin(error)
    kind = "" if is_refusal(error) else f"{type(error).__name__}: "
    return f"{kind}{first_line(str(error))}{f' ({line})' if line else ''}"


def _around(task: Task, plugins: Plugins) -> int:
    """Return what a page fault maps of the rows' file; 0 where it is not there, or no strategy opens it in its way."""
    opened = any("rows" in plugins.strategies[applied.name].rewrites for applied in task.case.strategies)
    return _around_in(task.corpus.path) if opened and task.corpus is not None else 0


@cache
def _around_in(path: Path) -> int:
    with suppress(OSError, ValueError):
        return page_faults.around(path)
    return 0


def _batch(task: Task, plugins: Plugins, backend: Any) -> Batch:
    """Return the batch that a step is predicted on: the largest, where they differ in size."""
    workload = plugins.workloads[task.case.workload]
    if workload.data != "documents":
        return workload.abstract_batch(shape_of(plugins, task.case))
    parts = assemble(plugins, task.case, corpus=task.corpus)
    real = backend.EAGER and task.case.place.device == "cpu"  # of values on a fake device nobody can ask
    return batch_sizes.largest(parts) if real else batch_sizes.sizes(workload, parts)


def _figures(task: Task, plugins: Plugins, host: Host, forecast: Forecast) -> dict[str, Any]:
    """Return the fields of a prediction: its peak, what it takes at most, its phases, its work."""
    peaks = forecast.peaks | host.beside(forecast.peaks)
    top = max(peaks, key=lambda name: peaks[name])
    limit = bound.at_most(kind_of(plugins, task.case, top), peaks[top]) if is_bounded(plugins, task.case) else None
    work = forecast.work if task.calls else by_intensity(forecast.work)
    return {
        "predicted_peak_bytes": peaks[top],
        "at_most_bytes": limit.peak_bytes + host.reclaimable if limit is not None else None,
        "at_most_coverage": limit.coverage if limit is not None else None,
        "predicted_phase": top,
        "predicted_phases": _phases(peaks),
        "predicted_work": work if task.case.ranks == 1 else (),  # what passes between ranks is not counted
        "predicted_stages": dict(forecast.stages),
        "predicted_kinds": dict(forecast.kinds),
        "predicted_reserved_bytes": forecast.reserved_bytes,
        "predicted_base_bytes": forecast.base_bytes or None,
        "predicted_driver_bytes": forecast.driver_bytes,
        "predicted_host_bytes": forecast.host_bytes,
        "predicted_standing": largest(forecast.standing),
    }


def _numbers(built: list[Parts]) -> dict[str, float]:
    """Return the numbers that the parts wrote down while they were predicted: choices that they made."""
    return notes.by_kind(built[-1].notes)[1] if built else {}


def _phases(peaks: dict[str, int]) -> tuple[Phase, ...]:
    return tuple(Phase(name=name, entry_bytes=0, peak_bytes=peak, exit_bytes=0) for name, peak in peaks.items())


def kind_of(plugins: Plugins, case: Case, phase: str) -> bound.Kind:
    """Return the kind of a prediction whose peak is in a phase."""
    strategies = [plugins.strategies[applied.name] for applied in case.strategies]
    lower = any(strategy.precision for strategy in strategies)
    attention = any("attend" in strategy.rewrites for strategy in strategies)
    return bound.Kind(str(case.place), case.ranks > 1, phase in HOST_PHASES, lower, attention)


def is_bounded(plugins: Plugins, case: Case) -> bool:
    """Check whether errors of other predictions say what a case takes at most.

    Not of a mixture of experts in less than float32: libraries keep memory for each number of tokens that an expert
    gets, which the data decide.
    """
    lower = any(plugins.strategies[applied.name].precision for applied in case.strategies)
    return not (lower and getattr(shape_of(plugins, case), "mixture", False))


def host_peaks(plugins: Plugins, case: Case, extent: Extent | None) -> Host:
    """Add up what the strategies of data declare; raise Unpredictable where one declares nothing."""
    if extent is not None:
        shuffles = any("order" in plugins.strategies[applied.name].rewrites for applied in case.strategies)
        extent = replace(extent, in_order=not (shuffles or case.shape.get("shuffle")))
    stating: list[Callable[[Extent], Holding]] = []
    for applied in case.strategies:
        strategy = plugins.strategies[applied.name]
        if not DATA_PARTS & set(strategy.rewrites):
            continue
        if strategy.holds is None or extent is None:
            raise Unpredictable(f"'{applied.name}' does not declare what it holds")
        stating.append(partial(strategy.holds, **applied.knobs))
    if extent is None:
        return Host({}, 0)
    declared = _declared(stating, extent)
    source = next((each.source for each in reversed(declared) if each.source is not None), extent.base)
    windows = source + sum(each.windows for each in declared)
    resident = windows + sum(each.batches for each in declared)
    fetched = resident + sum(each.fetching for each in declared) + 2 * extent.batch_bytes
    peaks = (source, windows + sum(each.making for each in declared), fetched)
    supposes = tuple(each.supposes for each in declared if each.supposes)
    reclaimable = sum(each.reclaimable for each in declared)
    return Host(dict(zip(HOST_PHASES, peaks, strict=True)), resident, supposes, reclaimable)


def _declared(stating: Sequence[Callable[[Extent], Holding]], extent: Extent) -> list[Holding]:
    """Return what each strategy holds, where others leave it fewer windows or narrower rows than there are."""
    declared = [holds(extent) for holds in stating]
    changed = [
        {name: size for name in ("rows", "stride", "input_bytes") if (size := getattr(each, name)) is not None}
        for each in declared
    ]
    for at, holds in enumerate(stating):
        of_others = [each for other, each in enumerate(changed) if other != at]
        sizes = {name: size for each in of_others for name, size in each.items() if name not in changed[at]}
        if sizes:
            declared[at] = holds(replace(extent, **sizes))
    return declared
