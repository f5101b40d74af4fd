"""Predict the peak of a case without running it."""

from typing import Any

from harness.assembly import assemble, shape_of
from harness.plugins import Plugins
from harness.records import Phase, Record, Task
from harness.types import Parts, Place
from harness.worker.kinds import first_line


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Return the predicted peak, its phase and the floor; a case that cannot be predicted says why."""
    case = task.case
    workload = plugins.workloads[case.workload]
    shape = shape_of(plugins, case)
    floor = workload.floor(shape)
    place = Place.parse(case.place)
    held = task.corpus.held_bytes if task.corpus is not None and place.device == "cpu" else 0
    on_cpu = case.model_copy(update={"place": str(place._replace(device="cpu"))})

    def build() -> Parts:
        return assemble(plugins, on_cpu, draw=lambda inner: backend.abstract_draw)

    try:
        peaks = backend.predict(build, place, workload.abstract_batch(shape), held, task.steps)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(str(error))}"
        return Record(floor_bytes=floor, missing={"predicted_peak_bytes": reason})
    top = max(peaks, key=lambda name: peaks[name])
    phases = tuple(Phase(name=name, entry_bytes=0, peak_bytes=peak, exit_bytes=0) for name, peak in peaks.items())
    return Record(floor_bytes=floor, predicted_peak_bytes=peaks[top], predicted_phase=top, predicted_phases=phases)
