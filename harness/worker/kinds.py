"""What each kind of task does, and how an error in it is named."""

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import psutil

from harness import backends, plugins
from harness.records import Record, Task
from harness.types import Place

MODULES = {
    "predict": "harness.worker.predict",
    "reference": "harness.worker.answers",
    "numerics": "harness.worker.answers",
    "memory": "harness.worker.memory",
    "pilot": "harness.worker.speed",
    "time": "harness.worker.speed",
}


@cache
def loaded(names: tuple[str, ...]) -> plugins.Plugins:
    """Load the plugins once a process."""
    return plugins.load(names)


def run(task: Task) -> Record:
    """Run one task; every exception becomes a record that names it."""
    place = Place.parse(task.case.place)
    try:
        backend = backends.load(place.backend)
        facts = backend.start(place if task.kind != "predict" else place._replace(device="cpu"))
        measure: Callable[[Task, plugins.Plugins, Any], Record] = import_module(MODULES[task.kind]).measure
        record = measure(task, loaded(task.plugins), backend)
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
    evidence = {"exception": type(error).__name__, "message": first_line(str(error))}
    status = "error"
    if where is not None:
        status = {"host": "oom_host", "device": "oom_device"}[where]
        asked = re.search(r"allocat\w+ (\d+) bytes", str(error))
        if asked:
            evidence["request_bytes"] = asked[1]
        if limit is not None and (where == "device" or _in_reach(limit, held, int(asked[1]) if asked else None)):
            status = "oom_budget"
            evidence["limit_bytes"] = str(limit)
    base = (so_far or Record()).model_copy()
    return base.model_copy(update={"status": status, "evidence": evidence})


def first_line(text: str) -> str:
    """Shorten a message to its first line."""
    return (text.strip().splitlines() or [""])[0][:400]


def _in_reach(limit: int, held: int, request: int | None) -> bool:
    """Say whether the limit was what refused: nearer than the end of the host's memory where the request is unknown."""
    if request is not None:
        return held + request > limit
    return limit - held < psutil.virtual_memory().available
