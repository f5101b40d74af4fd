"""The driver's view of this process on the GPU, sampled: what it holds beyond the allocator's own count.

Needs the package `nvidia-ml-py`; secondary to the allocator's figures, which miss nothing between two samples.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

SAMPLE_SECONDS = 0.05


@dataclass
class Seen:
    """The largest sample so far in bytes; None with a reason where there is none."""

    peak_bytes: int | None = None
    reason: str = ""


@contextmanager
def sampled(device: str) -> Iterator[Seen]:
    """Sample the driver until the block ends; on a CPU, or without the package, only say why nothing is seen."""
    seen = Seen()
    if device != "cuda":
        seen.reason = "the place is a CPU"
    elif find_spec("pynvml") is None:
        seen.reason = "the package nvidia-ml-py is not installed"
    if seen.reason:
        yield seen
        return
    stop = threading.Event()
    thread = threading.Thread(target=_sample, args=(seen, stop), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _sample(seen: Seen, stop: threading.Event) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not stop.wait(SAMPLE_SECONDS):
            samples = [
                process.usedGpuMemory or 0
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                if process.pid == os.getpid()
            ]
            if samples:
                seen.peak_bytes = max(seen.peak_bytes or 0, *samples)
        if seen.peak_bytes is None:
            seen.reason = "the driver does not list this process (another process namespace)"
    except pynvml.NVMLError as error:
        seen.reason = f"the driver refuses ({error})"
