"""How an error that ends a task is named in its record."""

import re
from typing import Any

import psutil

from harness import backends
from harness.contract.errors import line_of
from harness.contract.place import Place
from harness.records import Record, Status
from harness.refusal import Refusal
from harness.suite.units import UNITS

LIBRARIES = ("torch", "jax", "jaxlib", "numpy", "transformers", "torchao")
OURS = ("harness", "strategies")
"""Packages whose refusals say what to do."""


def failed(error: Exception, place: Place) -> Record:
    """Return the record of a task that an error ended, or that cannot be done here."""
    if isinstance(error, backends.Unavailable):
        return Record(status="unsupported", evidence={"message": str(error)})
    status, evidence = failure(error, place)
    return Record(status=status, evidence=evidence)


def failure(
    error: Exception, place: Place, limit: int | None = None, data_bytes: int = 0, line: str | None = None
) -> tuple[Status, dict[str, Any]]:
    """Name an error: memory that ran out (of a budget, the host or the device), or an error of the code.

    `limit` is the budget's bound in bytes, of the place's own memory; `data_bytes` is what counted towards it on a CPU
    when the error arrived. `line` is where it came from, of one that has lost its traceback.
    """
    where = backends.load(place.backend).ran_out(error)
    evidence: dict[str, Any] = {"exception": type(error).__name__, "message": first_line(str(error))}
    if where is None:
        line = line or origin(error)
        return "error", evidence | ({"line": line} if line else {})
    if (asked := request_bytes(str(error))) is not None:
        evidence["request_bytes"] = asked
    if limit is not None and (where == "device" or (place.device == "cpu" and _in_reach(limit, data_bytes))):
        return "oom_budget", evidence | {"limit_bytes": limit}
    return ("oom_host" if where == "host" else "oom_device"), evidence


def is_refusal(error: Exception) -> bool:
    """Check whether a strategy or a workload refused a value: not a library beneath them, which speaks of its own."""
    return isinstance(error, ValueError | Refusal) and _raised_by(error) not in LIBRARIES


def origin(error: Exception) -> str | None:
    """Return the line in the code of a plugin that an error came from; None where its text says what to do."""
    return None if is_refusal(error) and _raised_by(error) in OURS else line_of(error)


def _raised_by(error: Exception) -> str:
    """Return the package whose code raised an error; one of arrays in C counts as the code that called it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def request_bytes(text: str) -> int | None:
    """Read how many bytes were asked for when memory ran out; None where the message does not say."""
    asked = re.search(r"allocat\w+ ([\d.]+) ?(bytes|[KMGT]iB)", text)
    return None if asked is None else int(float(asked[1]) * UNITS.get(asked[2], 1))


def first_line(text: str) -> str:
    """Shorten a message to its first line, with what that announces; of a traceback to the error at its end."""
    lines = text.strip().splitlines() or [""]
    line, announced, _ = lines[0].partition("Traceback (most recent call last):")
    if announced:
        line += next((line for line in reversed(lines) if line[:1].strip() and line != lines[0]), "")
    elif line.endswith(":"):
        line = f"{line} {next(filter(None, map(str.strip, lines[1:])), '')}".strip()
    return line[:400]


def _in_reach(limit: int, data_bytes: int) -> bool:
    """Check whether it was the limit that refused: what it left was less than what the host still had.

    `data_bytes` is read when the error arrives, after temporaries were freed on its way, so that data + request may
    lie below a limit that did refuse.
    """
    return limit - data_bytes < psutil.virtual_memory().available
