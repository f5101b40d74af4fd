"""The driver's view of this process on its GPU: what it holds beyond the allocator's own count.

Needs the package `nvidia-ml-py`; secondary to the allocator's figures, which miss nothing between two samples.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

SAMPLE_SECONDS = 0.05
NOT_LISTED = "the driver does not list this process (another process namespace, or an instance of a GPU)"


@dataclass
class View:
    """This process on one GPU: the largest sample so far in bytes; None with a reason where there is none."""

    reason: str = ""
    peak_bytes: int | None = None
    _handle: Any = field(default=None, repr=False)

    def used(self) -> int | None:
        """Return the bytes that the driver counts for this process now; None, and why in `reason`, where it does not.

        They are those of its context, of the libraries, and of what allocators have reserved.
        """
        if self._handle is None:
            return None
        import pynvml

        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError as error:
            self.reason = f"the driver refuses ({error})"
            return None
        own = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
        known = [used for used in own if used is not None]
        self.reason = "" if known else NOT_LISTED
        return max(known, default=None)

    def sample(self) -> None:
        """Raise the peak to what is used now."""
        if (used := self.used()) is not None:
            self.peak_bytes = max(self.peak_bytes or 0, used)


def opened(device: str, index: int = 0) -> View:
    """Load the driver's library for the visible GPU with this index; do it before a base is taken of the host's memory.

    On a CPU, without the package, or where the driver refuses, the view only says why nothing is seen.
    """
    if device != "cuda":
        return View("the place is a CPU")
    if find_spec("pynvml") is None:
        return View("the package nvidia-ml-py is not installed")
    import pynvml

    try:
        pynvml.nvmlInit()
        chosen = _visible(index)
        if isinstance(chosen, int):
            return View(_handle=pynvml.nvmlDeviceGetHandleByIndex(chosen))
        return View(_handle=pynvml.nvmlDeviceGetHandleByUUID(chosen))
    except pynvml.NVMLError as error:
        return View(f"the driver refuses ({error})")


@contextmanager
def sampled(view: View) -> Iterator[None]:
    """Sample a view until the block ends; it must see something for that."""
    stop = threading.Event()

    def run() -> None:
        view.sample()
        while not stop.wait(SAMPLE_SECONDS):
            view.sample()

    if view._handle is None:
        yield
        return
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _visible(index: int) -> int | str:
    """Return the number or the UUID of the GPU that this process calls by an index; numbers follow the PCI bus."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if index >= len(names):
        return index
    return int(names[index]) if names[index].isdigit() else names[index]
