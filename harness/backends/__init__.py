"""The array frameworks, one module of the same functions each: see `Backend`."""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from glob import glob
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast

from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.protocols import Array, DrawPart, State, Tree
from harness.records.forecast import Forecast

Step: TypeAlias = Callable[[State, Array, Array], tuple[State, Array]]
"""Take a state and a batch (x, y); return the new state, for which the old one may be used up, and the loss."""
Sizes: TypeAlias = Sequence[tuple[tuple[int, ...], str]]
"""The shape and the dtype of each array of a batch."""
Batch: TypeAlias = Sizes | tuple[Array, Array]
"""A batch by its sizes; or one of numpy, of which the values decide what a step takes."""

NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

PROCESS_PER_RANK = ("torch",)
"""Backends whose ranks are processes; those of the others are the devices of one process."""

DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
"""Any of these shows a driver: containers may hide the first, and Linux under Windows has the last alone."""


class Unavailable(Exception):
    """A place that this machine does not have, in one sentence."""


class Incomplete(Exception):
    """Why a run on abstract arrays ended early, what would help, and the peak bytes of the phases up to there."""

    def __init__(self, reason: str, peaks: dict[str, int]) -> None:
        super().__init__(reason)
        self.peaks = peaks


class Backend(Protocol):
    """What the harness asks of a framework; a module is one by defining these functions."""

    @property
    def EAGER(self) -> bool:
        """Whether a step runs operation by operation, so that it can be resolved into phases while it runs."""

    def start(self, place: Place) -> dict[str, str]:
        """Make the device ready; return its facts. Raises Unavailable where there is none."""

    def warm(self, place: Place) -> None:
        """Make the libraries allocate the scratch that they keep, so that it lies in the base."""

    def deterministic(self, place: Place, strict: bool = True) -> None:
        """Ask for the same bits each time, in full precision; strictly, what cannot give them is an error."""

    def double(self) -> AbstractContextManager[object]:
        """Let arrays of 64 bits be made."""

    def cap(self, place: Place, budget: int | None) -> int | None:
        """Bound the device's allocator to a budget in bytes; return the bound, None where there is none.

        There is none without a budget, and where the device has less to give than that.
        """

    def prepare(self, parts: Parts, batch: Any = None, abstract: Parts | None = None) -> Step:
        """Make the step; compiled ahead of time for batches like `batch`, where `abstract` gives the state's shapes."""

    def like(self, batch: Sizes, device: str = "cpu") -> tuple[Array, ...]:
        """Describe a batch for `prepare` and `predict`."""

    def wait(self, outputs: Tree) -> None:
        """Return when all outputs are computed."""

    def finish(self, outputs: Tree) -> Any:
        """End one turn of the loop and return a time mark."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Compute the seconds between consecutive marks."""

    def clear(self, place: Place) -> None:
        """Drop the caches of the device's allocator and note the bytes in use as its base."""

    def reset_peak(self, place: Place) -> None:
        """Begin a new device peak."""

    def peak(self, place: Place) -> dict[str, int]:
        """Read the peak since then in bytes above the base, by meter; {} on the CPU."""

    def in_use(self, place: Place) -> int | None:
        """Read the bytes in use on the device now, above its base; None on the CPU."""

    def tracing(self) -> bool:
        """Return whether a compiler is looking at the code that runs."""

    def peaks(self, place: Place) -> list[int]:
        """Read the peak of each device of this process, in bytes above its base; [] on the CPU."""

    def reserved(self, place: Place) -> int | None:
        """Return the bytes that the device's allocator has taken from the driver; None where that is not known."""

    def ran_out(self, error: BaseException) -> str | None:
        """Return `host` or `device` when an error says that its memory ran out, else None."""

    def abstract_draw(self, parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Array:
        """Stand in for the drawing of a parameter where no values are wanted."""

    def predict(
        self,
        build: Callable[[], Parts],
        place: Place,
        batch: Batch,
        source_bytes: int,
        steps: int,
        ranks: int = 1,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> Forecast:
        """Return the peaks and the work of a run without running it, whose source takes so many bytes.

        `environment` are the variables that its process would be started with, beside those of the harness.
        """

    def agreed(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank: what each decides for itself must be decided alike."""

    def arrays(self, values: Tree) -> dict[str, tuple[Any, str]]:
        """Copy each leaf to numpy, bfloat16 widened exactly to float32, with the name of its own dtype."""

    def buffer(self, array: Array) -> memoryview:
        """Return the bytes of an array on the host."""

    def cast(self, inner: DrawPart, dtype: str) -> DrawPart:
        """Draw in another dtype: float64 for the reference, a declared precision for its own yardstick."""


def load(backend: str) -> Backend:
    """Import the module of a backend, and with it the framework."""
    return cast(Backend, importlib.import_module(f"harness.backends.{backend}"))


def processes(backend: str, ranks: int) -> int:
    """Count the processes of a case: one for each rank, or one for all."""
    return ranks if backend in PROCESS_PER_RANK else 1


def absent(backend: str, device: str, ranks: int = 1) -> str | None:
    """Return why a place is missing on this machine, as far as can be seen without importing the framework."""
    if find_spec(backend) is None:
        return f"the package {backend} is not installed"
    if device == "cuda" and not any(map(os.path.exists, DRIVER_FILES)):
        return "this machine has no NVIDIA GPU"
    # where the driver lists no cards, as in some containers, the ranks themselves say how many there are
    if device == "cuda" and ranks > 1 and 0 < (count := _cards()) < ranks:
        return f"{ranks} ranks need as many GPUs, and this machine has {count}"
    return None


def _cards() -> int:
    """Count the GPUs that a process may use; 0 where the driver lists none."""
    listed = len(glob("/proc/driver/nvidia/gpus/*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else min(listed, len([each for each in visible.split(",") if each.strip()]))
