"""What this machine does in a second at each place, measured once and kept."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import backends
from harness.contract.place import Place
from harness.machine import environment, facts


def of_place(place: Place, cache: Path, anew: bool = False) -> dict[str, Any] | None:
    """Give the measured rates of a place as plain figures, from the cache where they are; None where it is missing.

    Measuring takes a few seconds; nothing else should run meanwhile.
    """
    if backends.absent(place.backend, place.device) is not None:
        return None
    path = cache / f"rates-{facts.name()}.json"
    known = _read(path)
    key = f"{place} {facts.versions().get(place.backend, '')} {len(os.sched_getaffinity(0))} threads"
    if anew or key not in known:
        found = measured(place)
        if found is None:
            return None
        known[key] = found
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1), encoding="utf-8")
    return known[key]


def measured(place: Place) -> dict[str, Any] | None:
    """Measure in a process of its own; None where that fails."""
    env = environment.variables("time", place, "rates", len(os.sched_getaffinity(0)), None)
    command = [sys.executable, "-m", "harness.worker.throughput", place.backend, place.device]
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
