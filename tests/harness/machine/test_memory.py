"""Known bytes in, the same bytes out: each experiment runs in a fresh process with the environment of a memory worker.

The tolerance is 1 % or 0.5 MiB, whichever is larger; with more than 4 CPUs, or pages of more than 4 KiB, the kernel's
own counters are coarser than that.
"""

import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from harness import Place
from harness.machine import environment, facts, memory
from harness.records import Applied, Case, Task
from harness.run import runner
from harness.worker import steadiness

alone = pytest.mark.alone
"""For what measures this very process: beside other tests that would hold their frameworks, and threads of them."""

BLOCKS = Path(__file__).parents[1] / "known_bytes" / "blocks.py"
MIB = 1 << 20
SLACK = 0 if os.cpu_count() <= 4 and resource.getpagesize() == 4096 else memory.resolution_bytes()
LIBRARIES = ["numpy", "torch", "jax", "locked"]
ROOM = 3 << 30
"""Free bytes of which 1 GiB comes in huge pages: where less is free, what is there lies in pieces."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

HOLDER = """
import subprocess, sys
held = b"x" * (400 << 20)
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


def tolerance(size):
    return max(MIB // 2, size // 100) + SLACK


def told(experiment, argument, *, place="torch/cpu", under_a_large_parent=False, **changes):
    """Run one experiment with the environment of a memory worker; a change of None takes a variable away."""
    env = environment.variables("memory", Place.parse(place), "known-bytes", 1, None)
    env |= {name: value for name, value in changes.items() if value is not None}
    env = {name: value for name, value in env.items() if changes.get(name, value) is not None}
    command = [sys.executable, str(BLOCKS), experiment, str(argument)]
    if under_a_large_parent:
        command = [sys.executable, "-c", HOLDER, *command]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# The kernel's mark against known bytes


@pytest.mark.parametrize(
    ("library", "under_a_large_parent"),
    [
        *(pytest.param(library, False, id=library) for library in LIBRARIES),
        pytest.param("numpy", True, id="under a parent of 400 MiB"),
    ],
)
def test_the_peak_is_the_bytes_that_were_touched(library, under_a_large_parent):
    place = "jax/cpu" if library == "jax" else "torch/cpu"
    peaks = told("peaks", library, place=place, under_a_large_parent=under_a_large_parent)
    assert len(peaks) == 3
    for size, peak in peaks.items():
        assert abs(peak - int(size)) <= tolerance(int(size)), f"{int(size) >> 20} MiB: {peak / MIB:.2f} MiB"


@pytest.mark.parametrize("library", ["numpy", "locked"])
def test_a_reset_begins_a_new_peak(library):
    peaks = told("halves", library)
    assert abs(peaks["whole"] - 64 * MIB) <= tolerance(64 * MIB)
    assert abs(peaks["half"] - 32 * MIB) <= tolerance(32 * MIB)


def test_with_the_pins_what_was_freed_earlier_changes_nothing_and_without_them_it_does():
    untouched, after = told("history", 0), told("history", 31 * MIB)
    assert abs(untouched - 58 * MIB) <= tolerance(58 * MIB)  # the last two copies
    assert abs(after - untouched) < 0.005 * untouched + SLACK
    without = dict.fromkeys(environment.PINS)
    assert told("history", 31 * MIB, **without) > 1.1 * told("history", 0, **without)


def test_memory_that_is_asked_for_but_not_written_does_not_count():
    peaks = told("untouched", "")
    assert peaks["empty"] < MIB + SLACK
    assert peaks["sparse"] < 4 * MIB + SLACK  # 512 pages


def test_without_the_numpy_pin_one_byte_counts_as_a_huge_page():
    mode = HUGE_PAGES.read_text().split("[")[1].split("]")[0] if HUGE_PAGES.exists() else "absent"
    if mode not in ("madvise", "always"):
        pytest.skip(f"transparent huge pages are '{mode}' here: NumPy's advice has no effect")
    if (free := facts.free_bytes()) < ROOM:
        pytest.skip(f"{free >> 20} MiB are free here: the kernel may find too few huge pages")
    assert told("untouched", "", NUMPY_MADVISE_HUGEPAGE="1")["sparse"] > 900 * MIB


# Files


@pytest.fixture(scope="module")
def file_of_64_mib(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapped") / "ones.bin"
    kind = subprocess.run(["stat", "-f", "-c", "%T", path.parent], capture_output=True, text=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder is in memory: its pages count as shared, not as file pages")
    path.write_bytes(b"\x01" * (64 * MIB))
    return path


def test_a_mapped_file_counts_in_full_and_apart(file_of_64_mib):
    seen = told("mapped", file_of_64_mib)
    assert seen["total"] == 64 * MIB
    assert abs(seen["peak"] - 64 * MIB) <= tolerance(64 * MIB)
    assert abs(seen["file"] - 64 * MIB) <= tolerance(64 * MIB)
    assert seen["anon"] < MIB + SLACK


MAPPING = """
import numpy as np
from dataclasses import replace
from harness import Strategy, hookimpl

def on_torch(parts, path: str = ""):
    inner = parts.source

    def source(parts):
        parts_of_a_run.append(np.memmap(path, np.uint8, "r"))
        assert parts_of_a_run[-1].sum() == 64 << 20
        if parts.shape.tokens != 33:  # priming
            parts_of_a_run.clear()
        return inner(parts)

    parts_of_a_run = []
    return replace(parts, source=source)

@hookimpl
def harness_strategies():
    return [Strategy("mapping", rewrites=("source",), on={"torch": on_torch}, about="Read a mapped file.")]
"""


def test_a_memory_worker_raises_the_flag_file_backed(file_of_64_mib, tmp_path):
    plugin = tmp_path / "mapping.py"
    plugin.write_text(MAPPING)
    shape = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "tokens": 33}
    applied = Applied(name="mapping", knobs={"path": str(file_of_64_mib)})
    place = {"place": "torch/cpu", "corpus": "drawn", "tokenizer": "none"}
    case = Case(workload="decoder", shape=shape, strategies=(applied,), **place)
    task = Task(kind="memory", cases=(case,), run_id="mapping", parent=0, folder="", plugins=(str(plugin),))
    (record,) = runner.run(task, 1, 60)
    assert record.status == "ok", record.evidence
    assert "file_backed" in record.flags
    source = next(phase for phase in record.memory.phases if phase.name == "source")
    assert abs(source.file_bytes - 64 * MIB) <= tolerance(64 * MIB)
    assert abs(record.memory.peak_host_bytes - 64 * MIB) <= 2 * tolerance(64 * MIB)


# The budget


@pytest.mark.parametrize(
    ("library", "kinds", "message"),
    [
        ("numpy", {"MemoryError"}, "allocate"),
        ("torch", {"RuntimeError"}, "allocate"),
        ("jax", {"JaxRuntimeError", "ValueError"}, "RESOURCE_EXHAUSTED"),
    ],
)
def test_a_request_beyond_the_budget_fails_cleanly_and_the_limit_is_lifted(library, kinds, message):
    seen = told("budget", library, place="jax/cpu" if library == "jax" else "torch/cpu")
    assert 63 * MIB < seen["allowed"] <= 64 * MIB
    assert kinds & set(seen["types"])
    assert message in seen["message"]
    assert seen["ran_out"] == "host"
    assert seen["other"] is None
    assert seen["lifted"]


def test_scratch_that_a_library_finds_no_memory_for_ran_out_of_it():
    seen = told("library_scratch", "jax", place="jax/cpu")
    assert "INTERNAL: " in seen["message"], "XLA does not say that it was memory"
    assert seen["ran_out"] == "host"


def test_a_budget_that_the_shell_does_not_allow_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (64 * MIB, 64 * MIB))
    with pytest.raises(ValueError, match=r"`ulimit -Hd` allows 64: raise it"), memory.budget(1 << 40):
        raise AssertionError("nothing runs without its bound")


@alone
def test_no_budget_sets_no_limit():
    with memory.budget(None) as limit:
        assert limit is None
        assert np.ones(64 * MIB // 8).sum() == 64 * MIB // 8


# Phases


def block(mib, shared=False):
    """Anonymous memory of its own map, every page touched."""
    kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    size = int(mib * MIB)
    held = mmap.mmap(-1, size, flags=kind | mmap.MAP_ANONYMOUS)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(held)), 1, size)
    return held


@pytest.fixture
def meter():
    block(1)
    memory.settle()
    meter = memory.PhaseMeter()
    meter.start()
    assert memory.mark_is_low()
    return meter


def near(size, mib):
    return abs(size - mib * MIB) <= 1.5 * MIB + SLACK


@alone
def test_the_peak_of_a_run_is_that_of_its_largest_phase_which_is_named(meter):
    with meter.phase("small"):
        block(8)
    with meter.phase("large"):
        block(32)
        held = block(16)
    with meter.phase("after"):
        block(4)
    peaks = {name: phase.peak_bytes for name, phase in meter.phases.items()}
    assert list(peaks) == ["small", "large", "after"]
    assert near(peaks["small"], 8) and near(peaks["large"], 32) and near(peaks["after"], 20)
    assert meter.peak_bytes == max(peaks.values()) == peaks["large"]
    assert meter.peak_phase == "large"
    after = meter.phases["after"]
    assert near(after.entry_bytes, 16) and near(after.exit_bytes, 16) and near(after.anon_bytes, 16)
    assert len(held) == 16 * MIB


@alone
def test_phases_whose_peaks_differ_by_less_than_the_meter_resolves_are_all_named(meter):
    for name, mib in (("first", 24), ("low", 16), ("second", 24.25)):
        with meter.phase(name):
            block(mib)
    assert set(meter.peak_phase.split(", ")) == {"first", "second"}


@alone
def test_a_phase_that_comes_again_keeps_its_larger_occurrence(meter):
    for mib in (4, 24, 8):
        with meter.phase("step"):
            block(mib)
    assert near(meter.phases["step"].peak_bytes, 24)
    assert len(meter.readings["step"]) == 3


@alone
def test_entering_a_phase_ends_the_one_before(meter):
    meter.enter("a")
    block(16)
    meter.enter("b")
    meter.enter(None)
    block(32)  # between phases: nobody's
    meter.enter("c")
    meter.enter(None)
    assert near(meter.phases["a"].peak_bytes, 16)
    assert near(meter.phases["b"].peak_bytes, 0)
    assert near(meter.phases["c"].peak_bytes, 0)
    assert (meter.current, meter.last) == (None, "c")


@alone
def test_what_stays_after_each_step_shows_as_a_slope(meter):
    held = []
    for _ in range(6):
        with meter.phase("steady_step"):
            held.append(block(3))
    assert steadiness.slope(meter.readings["steady_step"]) == pytest.approx(3 * MIB, rel=0.1)


@alone
def test_shared_pages_are_counted_apart(meter):
    with meter.phase("share"):
        held = block(16, shared=True)
    assert near(meter.phases["share"].shmem_bytes, 16)
    assert near(meter.phases["share"].peak_bytes, 16)
    assert near(meter.phases["share"].anon_bytes, 0)
    assert len(held) == 16 * MIB


@alone
def test_a_phase_that_raises_is_measured_too(meter):
    with pytest.raises(ValueError, match="on purpose"), meter.phase("raises"):
        block(16)
        raise ValueError("on purpose")
    assert near(meter.phases["raises"].peak_bytes, 16)
    assert meter.current is None


@alone
def test_a_watcher_is_told_of_every_boundary_with_the_peaks_so_far(meter):
    seen = []
    meter.on_change = lambda meter: seen.append((meter.current, meter.peak_bytes))
    with meter.phase("a"):
        block(16)
    with meter.phase("b"):
        pass
    assert [phase for phase, _ in seen] == ["a", None, "b", None]
    assert seen[0][1] == 0
    assert all(near(peak, 16) for _, peak in seen[1:])


@alone
def test_settling_says_when_the_resident_set_does_not_stand_still():
    stop, held = threading.Event(), []

    def grow():
        while not stop.wait(0.002):
            held.append(block(1))

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        assert memory.settle(0.3) is False
    finally:
        stop.set()
        thread.join()
    held.clear()
    assert memory.settle() is True


def test_a_process_that_is_gone_cannot_be_read():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(OSError, match=r"No such (file|process)"):
        memory.read(child.pid)


@pytest.mark.parametrize(
    ("groups", "events"),
    [
        ("0::/user.slice/run.scope\n", "user.slice/run.scope/memory.events"),  # a plain host, version 2
        ("0::/\n", "memory.events"),  # a container, whose own group looks like the root
        ("0::/host/path\n", "memory.events"),  # one that sees the path of the host
        ("4:memory:/user\n0::/\n", "memory/memory.oom_control"),  # version 1
        (None, "memory.events"),
        ("0::/user.slice/run.scope\n", None),
    ],
)
def test_kills_of_the_own_control_group_are_counted(tmp_path, groups, events):
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    if events is not None:
        path = tmp_path / "sys/fs/cgroup" / events
        path.parent.mkdir(parents=True)
        path.write_text("low 5\noom 9\noom_kill 3\n")
    assert memory.kernel_kills(str(tmp_path)) == (0 if events is None else 3)
