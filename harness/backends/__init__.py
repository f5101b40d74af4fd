"""The array frameworks, one module of the same few functions each.

==================  ================================================================================
start(place)        make the device ready; raise Unavailable where it is not
warm(place)         take the scratch that the libraries keep, so that it lies in the base
cap(place, bytes)   bound the device's allocator to a budget, None for no bound; return the bound
prepare(parts, b)   a step `(state, x, y) -> (state, loss)`; compiled ahead for batches like `b`
like(batch)         an abstract batch for `prepare` and `predict`, from shapes and dtypes
wait(outputs)       return when everything asked for is computed
finish(outputs)     end one turn of the loop and return a time mark
seconds(marks)      the time between marks, as floats
clear(place)        drop caches of the device's allocator and take its base
reset_peak(place)   begin a new device peak
peak(place)         device bytes by meter since then, {} on the CPU
ran_out(error)      "host" or "device" when the error says that memory ran out, else None
predict(...)        a Forecast of a run without running it
agreed(flag)        whether any rank says so: what each decides for itself must be decided alike
arrays(tree)        numpy arrays and dtype names of a tree's leaves
==================  ================================================================================
"""

import importlib
import os
from glob import glob
from importlib.util import find_spec
from types import ModuleType

PROCESS_PER_RANK = ("torch",)
"""Backends whose ranks are processes; those of the others are the devices of one process."""


class Unavailable(Exception):
    """A place that this machine does not have, in one sentence."""


def load(backend: str) -> ModuleType:
    """Import the module of a backend, and with it the framework."""
    return importlib.import_module(f"harness.backends.{backend}")


def processes(place: str, ranks: int) -> int:
    """Count the processes that the ranks of a case are: one for each, or one for all."""
    return ranks if place.partition("/")[0] in PROCESS_PER_RANK else 1


def absent(backend: str, device: str, ranks: int = 1) -> str | None:
    """Say why a place is missing on this machine, as far as can be seen without importing the framework."""
    if find_spec(backend) is None:
        return f"the package {backend} is not installed"
    if device == "cuda" and not os.path.exists("/proc/driver/nvidia/version"):
        return "this machine has no NVIDIA GPU"
    if device == "cuda" and ranks > 1 and (count := len(glob("/proc/driver/nvidia/gpus/*"))) < ranks:
        return f"{ranks} ranks need as many GPUs, and this machine has {count}"
    return None
