"""Wait for a turn: stop this process, with the threads and processes that it started, until the harness goes on."""

import os
import signal
import time
from pathlib import Path

from harness.records.task import TURN_PIPE

_rests: list[float] = []
"""How long this process was stopped, each time, in seconds."""


def wait(folder: str) -> None:
    """Stop the group of this process until its turn comes.

    What a strategy runs beside the loop, as threads or as processes of this group, stops too: it would disturb the
    turns of others, and what it prepared meanwhile would cost nothing.
    """
    with open(Path(folder, TURN_PIPE), "wb", buffering=0) as pipe:
        pipe.write(b".")
    stopped = time.perf_counter()
    os.killpg(0, signal.SIGSTOP)
    _rests.append(time.perf_counter() - stopped)


def rested() -> float:
    """Return how long this process was stopped in all, in seconds."""
    return sum(_rests)
