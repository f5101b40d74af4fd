"""What each kind of task does."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from harness import backends
from harness.contract.plugins import Plugins
from harness.records import Record, Task
from harness.worker.failures import failed

MODULES = {
    "predict": "harness.worker.prediction",
    "reference": "harness.worker.numerics",
    "numerics": "harness.worker.numerics",
    "memory": "harness.worker.memory",
    "pilot": "harness.worker.timing",
    "time": "harness.worker.timing",
    "contract": "harness.worker.contract_checks",
}


def run(task: Task, loaded: Plugins) -> Record:
    """Run one task with the plugins loaded; every exception becomes a record that names it."""
    place = task.case.place
    try:
        backend = backends.load(place.backend)
        facts = backend.start(place if task.kind != "predict" else place._replace(device="cpu"))
        measure: Callable[[Task, Plugins, Any], Record] = import_module(MODULES[task.kind]).measure
        record = measure(task, loaded, backend)
        machine = {**record.origin.machine, **facts}
        return record.model_copy(update={"origin": record.origin.model_copy(update={"machine": machine})})
    except Exception as error:
        return failed(error, place)
