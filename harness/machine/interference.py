"""Whether something disturbed a timed run: other work, other machines on the same processor, heat; also on a GPU."""

import os
from dataclasses import dataclass
from pathlib import Path

from harness.machine import gpu
from harness.records.place import Place

STEAL_SHARE = 0.01
THROTTLE = "thermal_throttle/core_throttle_count"


@dataclass(frozen=True)
class Snapshot:
    """The kernel's counters at one moment."""

    steal: int
    total: int
    running: int
    throttled: int
    of_gpu: gpu.State | None = None


def snapshot(place: Place | None = None) -> Snapshot:
    """Read the counters, for places of a GPU its own too; take one before a timed worker starts and one after it."""
    lines = Path("/proc/stat").read_text().splitlines()
    ticks = [int(value) for value in lines[0].split()[1:]]
    running = next((int(line.split()[1]) for line in lines if line.startswith("procs_running")), 1)
    of_gpu = gpu.state() if place is not None and place.device == "cuda" else None
    return Snapshot(ticks[7] if len(ticks) > 7 else 0, sum(ticks[:8]), running, _throttled(), of_gpu)


def disturbances(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """Return what disturbed the time between two snapshots.

    `stolen`: the hypervisor gave more than 1 % of the time to others. `crowded`: more than half as many other tasks
    as CPUs wanted to run at the start (the load average would count the worker before); where this process may use
    some of the CPUs alone, nobody knows which of them those tasks wanted. `throttled`: heat. On a GPU `gpu_shared`:
    another program was on it, and `gpu_throttled`: heat or power held its clock back.
    """
    flags = []
    if after.steal - before.steal > STEAL_SHARE * max(1, after.total - before.total):
        flags.append("stolen")
    cpus = os.cpu_count() or 1
    if len(os.sched_getaffinity(0)) >= cpus and before.running - 1 > cpus / 2:
        flags.append("crowded")
    if after.throttled > before.throttled:
        flags.append("throttled")
    if before.of_gpu is not None and after.of_gpu is not None:
        flags += ["gpu_shared"] if before.of_gpu.others or after.of_gpu.others else []
        flags += ["gpu_throttled"] if after.of_gpu.slowed > before.of_gpu.slowed else []
    return tuple(flags)


def _throttled() -> int:
    return sum(int(file.read_text()) for file in Path("/sys/devices/system/cpu").glob(f"cpu[0-9]*/{THROTTLE}"))
