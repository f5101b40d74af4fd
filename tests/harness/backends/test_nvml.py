"""The driver's view of a process, through a stand-in for its library."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from harness.backends import nvml

OWN, OTHER = os.getpid(), os.getpid() + 1


class NVMLError(Exception):
    """What the library raises."""


@pytest.fixture
def library(monkeypatch):
    """A library that lists processes as a test says, and remembers which GPU it was asked for."""
    library = ModuleType("pynvml")
    library.NVMLError, library.asked, library.running = NVMLError, [], []
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByIndex = lambda index: library.asked.append(index) or "handle"
    library.nvmlDeviceGetHandleByUUID = lambda uuid: library.asked.append(uuid) or "handle"
    library.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in library.running
    ]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(nvml, "find_spec", lambda name: object())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.mark.parametrize(
    ("visible", "index", "asked"),
    [("", 0, 0), ("", 1, 1), ("3,1", 0, 3), ("3,1", 1, 1), ("GPU-abc", 0, "GPU-abc"), ("MIG-x,MIG-y", 1, "MIG-y")],
)
def test_the_gpu_is_that_of_the_process_and_of_its_rank(library, monkeypatch, visible, index, asked):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml.opened("cuda", index)
    assert library.asked == [asked]


def test_the_largest_sample_of_this_process_is_kept(library):
    view = nvml.opened("cuda")
    with nvml.sampled(view):
        for used in (500, 900, 700):
            library.running = [(OTHER, 5000), (OWN, used)]
            view.sample()
    assert (view.peak_bytes, view.used(), view.reason) == (900, 700, "")


@pytest.mark.parametrize("running", [[], [(OTHER, 5000)], [(OWN, None)]])
def test_a_container_that_hides_processes_is_named(library, running):
    library.running = running
    view = nvml.opened("cuda")
    with nvml.sampled(view):
        pass
    assert view.peak_bytes is None and "does not list this process" in view.reason


def test_a_driver_that_refuses_is_quoted(library, monkeypatch):
    def refuse():
        raise NVMLError("Insufficient Permissions")

    library.nvmlInit = refuse
    view = nvml.opened("cuda")
    with nvml.sampled(view):
        assert view.used() is None
    assert view.reason == "the driver refuses (Insufficient Permissions)"


def test_without_the_package_or_on_a_cpu_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(nvml, "find_spec", lambda name: None)
    assert nvml.opened("cuda").reason == "the package nvidia-ml-py is not installed"
    assert nvml.opened("cpu").reason == "the place is a CPU"
