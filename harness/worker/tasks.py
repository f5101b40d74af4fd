"""What each kind of task does, and how an error in it is named."""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import psutil

from harness import backends
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.records import Record, Status, Task
from harness.suite.units import UNITS

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


def failed(error: Exception, place: Place) -> Record:
    """Return the record of a task that an error ended, or that cannot be done here."""
    if isinstance(error, backends.Unavailable):
        return Record(status="unsupported", evidence={"message": str(error)})
    status, evidence = failure(error, place)
    return Record(status=status, evidence=evidence)


def failure(
    error: Exception, place: Place, limit: int | None = None, data_bytes: int = 0
) -> tuple[Status, dict[str, Any]]:
    """Name an error: memory that ran out (of a budget, the host or the device), or an error of the code.

    `limit` is the budget's bound in bytes, of the place's own memory; `data_bytes` is what counted towards it on a CPU
    when the error arrived.
    """
    where = backends.load(place.backend).ran_out(error)
    evidence: dict[str, Any] = {"exception": type(error).__name__, "message": first_line(str(error))}
    if where is None:
        return "error", evidence
    if (asked := request_bytes(str(error))) is not None:
        evidence["request_bytes"] = asked
    if limit is not None and (where == "device" or (place.device == "cpu" and _in_reach(limit, data_bytes))):
        return "oom_budget", evidence | {"limit_bytes": limit}
    return ("oom_host" if where == "host" else "oom_device"), evidence


def request_bytes(text: str) -> int | None:
    """Read how many bytes were asked for when memory ran out; None where the message does not say."""
    asked = re.search(r"allocat\w+ ([\d.]+) ?(bytes|[KMGT]iB)", text)
    return None if asked is None else int(float(asked[1]) * UNITS.get(asked[2], 1))


def first_line(text: str) -> str:
    """Shorten a message to its first line; where that announces a traceback, to the error at its end."""
    lines = text.strip().splitlines() or [""]
    line, announced, _ = lines[0].partition("Traceback (most recent call last):")
    if announced:
        line += next((line for line in reversed(lines) if line[:1].strip() and line != lines[0]), "")
    return line[:400]


def _in_reach(limit: int, data_bytes: int) -> bool:
    """Check whether it was the limit that refused: what it left was less than what the host still had.

    `data_bytes` is read when the error arrives, after temporaries were freed on its way, so that data + request may
    lie below a limit that did refuse.
    """
    return limit - data_bytes < psutil.virtual_memory().available
