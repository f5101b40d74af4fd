"""Time operator calls of torch on this machine: `python -m harness.worker.operators DEVICE FILE SECONDS`.

The file is a JSON list of calls. Printed is an object of seconds by call, null for those that fail here; calls that
would begin after so many seconds are not in it. A figure is
the fastest of a few turns: the results lie in new memory each time, as within a step, but memory that a virtual machine
gets from its host for the first time takes several times as long.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import backends
from harness.backends.torch_calls import ready
from harness.contract.place import Place

TURNS, ENOUGH = 6, 0.01
"""Turns of a call at least, and the seconds that are spent on more of them."""


def timed(device: str, calls: list[str], spent: float) -> dict[str, float | None]:
    """Return the seconds of each call that begins before so many seconds have gone; None of one that cannot be made."""
    backend = backends.load("torch")
    backend.start(Place("torch", device))
    seconds: dict[str, float | None] = {}
    until = time.monotonic() + spent
    for call in calls:
        if time.monotonic() > until:
            break
        try:
            seconds[call] = one(ready(call, device), backend.wait)
        except Exception:
            seconds[call] = None
    return seconds


def one(turn: Callable[[], Any], wait: Callable[[Any], None]) -> float:
    """Return the seconds of a turn."""
    wait(turn())
    times: list[float] = []
    while len(times) < TURNS or sum(times) < ENOUGH:
        started = time.perf_counter()
        wait(turn())
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    calls = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps(timed(sys.argv[1], calls, float(sys.argv[3]))))
