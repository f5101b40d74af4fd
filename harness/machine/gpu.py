"""What the driver's own tool says of the first visible GPU: its memory, who else is on it, what slowed it down.

Of the others it is asked for their names alone.
"""

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from harness.machine import facts

FACTS = ("name", "memory.total", "memory.free", "driver_version")
MORE_FACTS = ("memory.reserved", "mig.mode.current")
"""What drivers of before 2021 do not know."""
INSTANCE = "MIG-"
"""How the name of an instance begins: the tool is asked for all cards then, and the first need not have it."""
SLOWED = ("hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Counters, in microseconds since the driver was loaded, of what makes a clock slower than it was asked to be."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: `usable_bytes` is what programs can be given, without what the driver keeps for itself.

    With `mig` it is cut into instances, and the figures are those of the whole card, not of an instance.
    """

    name: str
    usable_bytes: int
    free_bytes: int
    driver: str
    mig: bool = False


@dataclass(frozen=True)
class State:
    """What may disturb a timed run on a GPU: programs of others, and microseconds for which its clock was held back."""

    others: int = 0
    slowed: int = 0


def detect() -> Gpu | None:
    """Return the first visible GPU as it is now; None where the driver's tool is absent, fails, or sees none."""
    fields = _asked(FACTS)
    if fields is None or not (fields["memory.total"].isdigit() and fields["memory.free"].isdigit()):
        return None
    fields |= _asked(MORE_FACTS) or dict.fromkeys(MORE_FACTS, "")
    reserved = int(fields["memory.reserved"]) if fields["memory.reserved"].isdigit() else 0
    total, free = int(fields["memory.total"]), int(fields["memory.free"])
    mig = fields["mig.mode.current"] == "Enabled" or _first_visible().startswith(INSTANCE)
    return Gpu(fields["name"], (total - reserved) << 20, free << 20, fields["driver_version"], mig)


@cache
def usable_bytes() -> int | None:
    """Return the memory of the first visible GPU that programs can use; None where it is not known.

    The memory of an instance (MIG) is not: the tool tells that of the whole card.
    """
    gpu = detect()
    return None if gpu is None or gpu.mig else gpu.usable_bytes


def visible() -> list[str]:
    """Return the names of the visible GPUs: UUIDs, or what CUDA_VISIBLE_DEVICES calls them where the tool knows none.

    Without both, `0` stands for the first GPU.
    """
    lines = (_run(["--query-gpu=index,uuid", "--format=csv,noheader"]) or "").splitlines()
    uuids = {index.strip(): uuid.strip() for index, comma, uuid in (line.partition(",") for line in lines) if comma}
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(uuids.values()) or ["0"]
    names = [name for each in chosen.split(",") if (name := each.strip()) not in ("", "-1")]
    return list(dict.fromkeys(uuids.get(name) or _in_full(name, uuids.values()) for name in names))


def _in_full(name: str, uuids: Iterable[str]) -> str:
    """Return the UUID that a name abbreviates; the name where it is none of them."""
    return next((uuid for uuid in uuids if name.startswith("GPU-") and uuid.startswith(name)), name)


def free_to_use() -> int | None:
    """Return what a case may take of the first visible GPU now: what is free of it, but for the driver's share."""
    gpu = detect()
    if gpu is None or gpu.mig:
        return None
    return min(gpu.free_bytes, int(gpu.usable_bytes * facts.DEVICE_SHARE))


def is_exclusive() -> bool:
    """Return whether the first visible GPU takes one process at a time, by its compute mode."""
    return (_asked(("compute_mode",)) or {}).get("compute_mode", "").startswith("Exclusive")


def state() -> State | None:
    """Read what may disturb a timed run; None where the driver's tool says nothing, or not of an instance alone."""
    if _first_visible().startswith(INSTANCE):
        return None
    running = _output(["--query-compute-apps=pid", "--format=csv,noheader,nounits"])
    if running is None:
        return None
    counters = _asked(tuple(f"clocks_event_reasons_counters.{name}" for name in SLOWED)) or {}
    return State(len(running.split()), sum(int(value) for value in counters.values() if value.isdigit()))


def _asked(fields: tuple[str, ...]) -> dict[str, str] | None:
    text = _output([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    values = [value.strip() for value in (text or "").partition("\n")[0].split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else None


def _output(arguments: list[str]) -> str | None:
    """Run the driver's tool for the first visible GPU; None where it is absent or refuses, or no GPU is visible."""
    first = _first_visible()
    if first in ("", "-1"):
        return None
    chosen = [] if first.startswith(INSTANCE) else [f"--id={first}"]
    return _run([*chosen, *arguments])


def _first_visible() -> str:
    """Return what CUDA_VISIBLE_DEVICES calls the first visible GPU, or the instance."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()


def _run(arguments: list[str]) -> str | None:
    """Run the driver's tool; None where it is absent or refuses."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
