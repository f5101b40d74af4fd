"""What each kind of task does, and how an error in it is named."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import psutil

from harness import backends
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.records import Record, Task

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
    place = Place.parse(task.case.place)
    try:
        backend = backends.load(place.backend)
        facts = backend.start(place if task.kind != "predict" else place._replace(device="cpu"))
        measure: Callable[[Task, Plugins, Any], Record] = import_module(MODULES[task.kind]).measure
        record = measure(task, loaded, backend)
        return record.model_copy(update={"machine": {**record.machine, **facts}})
    except backends.Unavailable as error:
        return Record(status="unsupported", evidence={"message": str(error)})
    except Exception as error:
        return failed(error, place)


def failed(
    error: Exception, place: Place, so_far: Record | None = None, limit: int | None = None, held: int = 0
) -> Record:
    """Name an error: memory that ran out (of a budget, the host or the device), or an error of the code."""
    backend = backends.load(place.backend)
    where = backend.ran_out(error)
    evidence: dict[str, Any] = {"exception": type(error).__name__, "message": first_line(str(error))}
    status = "error"
    if where is not None:
        status = {"host": "oom_host", "device": "oom_device"}[where]
        asked = re.search(r"allocat\w+ (\d+) bytes", str(error))
        if asked:
            evidence["request_bytes"] = int(asked[1])
        if limit is not None and (where == "device" or _in_reach(limit, held)):
            status = "oom_budget"
            evidence["limit_bytes"] = limit
    base = (so_far or Record()).model_copy()
    return base.model_copy(update={"status": status, "evidence": evidence})


def first_line(text: str) -> str:
    """Shorten a message to its first line; where that announces a traceback, to the error at its end."""
    lines = text.strip().splitlines() or [""]
    told, announced, _ = lines[0].partition("Traceback (most recent call last):")
    if announced:
        told += next((line for line in reversed(lines) if line[:1].strip() and line != lines[0]), "")
    return told[:400]


def _in_reach(limit: int, held: int) -> bool:
    """Say whether it was the limit that refused: what it left was less than what the host still had.

    `held` is read when the error arrives, after temporaries were freed on its way, so that held + request may lie
    below a limit that did refuse.
    """
    return limit - held < psutil.virtual_memory().available
