"""What this machine computes in a second at each place, measured once and stored."""

import json
import os
from pathlib import Path
from typing import Any

from harness import backends
from harness.contract.place import Place
from harness.machine import environment, facts
from harness.machine.child import AnswerError, answer_of


def of_place(place: Place, cache: Path, anew: bool = False) -> dict[str, Any] | None:
    """Return the measured rates of a place as plain figures, from the cache if they are there; None without the place.

    Measuring takes a few seconds; nothing else should run meanwhile.
    """
    if backends.absent(place.backend, place.device) is not None:
        return None
    path = cache / f"rates-{facts.name()}.json"
    rates = _read(path)
    key = f"{place} {facts.versions().get(place.backend, '')} {len(os.sched_getaffinity(0))} threads"
    if anew or key not in rates:
        measured_rates = measured(place)
        if measured_rates is None:
            return None
        rates[key] = measured_rates
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rates, indent=1), encoding="utf-8")
    return rates[key]


def measured(place: Place) -> dict[str, Any] | None:
    """Measure in a process of its own; None where that fails."""
    env = environment.variables("time", place, "rates", len(os.sched_getaffinity(0)), None)
    try:
        return answer_of("harness.worker.throughput", place.backend, place.device, env=env)
    except AnswerError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return rates if isinstance(rates, dict) else {}
