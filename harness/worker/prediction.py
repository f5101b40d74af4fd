"""Predict the peak of a case without running it: the step on abstract arrays, the data from what strategies declare."""

from dataclasses import replace
from typing import Any

from harness.backends import Batch, Incomplete, Unavailable
from harness.contract.assembly import assemble, shape_of
from harness.contract.data import Extent, Held
from harness.contract.parts import DATA_PARTS, Parts
from harness.contract.plugins import Plugins
from harness.records import Case, Phase, Prediction, Record, Task
from harness.records.roofline import by_intensity, largest
from harness.worker import batch_sizes
from harness.worker.tasks import first_line

GUESSED = "a step asks for the value of a number, which was taken to be 1 or true"


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Return the predicted peak of a rank, its phase and the floor; a case that cannot be predicted says why."""
    case = task.case
    workload = plugins.workloads[case.workload]
    shape = shape_of(plugins, case)
    floor = workload.floor(shape) // case.ranks
    parameters = workload.parameters(shape) if workload.parameters is not None else None
    place = case.place
    built: list[Parts] = []

    def build() -> Parts:
        built.append(assemble(plugins, case, draw=lambda inner: backend.abstract_draw))
        return built[-1]

    try:
        extent = workload.extent(shape, task.corpus, task.steps) if workload.extent is not None else None
        extent = replace(extent, backend=place.backend) if extent is not None else None
        host, source_bytes = host_peaks(plugins, case, extent) if place.device == "cpu" else ({}, 0)
        batch: Batch = workload.abstract_batch(shape)
        if workload.data == "documents":
            parts = assemble(plugins, case, corpus=task.corpus)
            real = backend.EAGER and place.device == "cpu"  # of values on a fake device nobody can ask
            batch = batch_sizes.largest(parts) if real else batch_sizes.sizes(workload, parts)
        forecast = backend.predict(build, place, batch, source_bytes, task.steps, case.ranks)
    except Exception as error:
        explained = isinstance(error, Undeclared | Unavailable | Incomplete)
        reason = str(error) if explained else f"{type(error).__name__}: {first_line(str(error))}"
        ended = _phases(error.peaks) if isinstance(error, Incomplete) else ()
        known = Prediction(floor_bytes=floor, parameters=parameters, predicted_phases=ended)
        return Record(missing={"predicted_peak_bytes": reason}, prediction=known)
    peaks = forecast.peaks | host
    top = max(peaks, key=lambda name: peaks[name])
    work = forecast.work if task.calls else by_intensity(forecast.work)
    figures = Prediction(
        floor_bytes=floor,
        parameters=parameters,
        predicted_peak_bytes=peaks[top],
        predicted_phase=top,
        predicted_phases=_phases(peaks),
        predicted_work=work if case.ranks == 1 else (),  # what passes between ranks is not counted
        predicted_stages=dict(forecast.stages),
        predicted_kinds=dict(forecast.kinds),
        predicted_reserved_bytes=forecast.reserved_bytes,
        predicted_driver_bytes=forecast.driver_bytes,
        predicted_host_bytes=forecast.host_bytes,
        predicted_standing=largest(forecast.standing),
    )
    notes = {"prediction": GUESSED} if forecast.supposed else {}
    if forecast.target:
        notes["gpu"] = f"predicted for one {forecast.target}, whichever runs it"
    return Record(notes=notes, extra=_numbers(built), prediction=figures)


def _phases(peaks: dict[str, int]) -> tuple[Phase, ...]:
    return tuple(Phase(name=name, entry_bytes=0, peak_bytes=peak, exit_bytes=0) for name, peak in peaks.items())


def _numbers(built: list[Parts]) -> dict[str, float]:
    """Return the numbers that the parts wrote down while they were predicted: choices that they made."""
    return {name: note for name, note in built[-1].notes.items() if isinstance(note, int | float)} if built else {}


class Undeclared(Exception):
    """A strategy of data that does not say what it holds."""


def host_peaks(plugins: Plugins, case: Case, extent: Extent | None) -> tuple[dict[str, int], int]:
    """Add up what the strategies of data declare: the peak of each host phase, and what stays held in the steps.

    Raises Undeclared where one declares nothing.
    """
    declared: list[Held] = []
    for applied in case.strategies:
        strategy = plugins.strategies[applied.name]
        if not DATA_PARTS & set(strategy.rewrites):
            continue
        if strategy.holds is None or extent is None:
            raise Undeclared(f"'{applied.name}' does not declare what it holds")
        declared.append(strategy.holds(extent, **applied.knobs))
    if extent is None:
        return {}, 0
    source = next((each.source for each in reversed(declared) if each.source is not None), extent.base)
    windows = source + sum(each.windows for each in declared)
    resident = windows + sum(each.batches for each in declared)
    making = sum(each.making for each in declared)
    return {"source": source, "windows": windows + making, "batches": resident + 2 * extent.batch_bytes}, resident
