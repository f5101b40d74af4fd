"""What this machine is, as far as it decides a figure."""

import hashlib
import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from harness.backends import processor

HOST_SHARE = 0.8
"""The share of a machine's memory that a case may take: the process itself and others need some."""
DEVICE_SHARE = 0.95
"""The share of a GPU's memory that a case may take: the driver needs some."""
LONGEST_COMMIT = 60
PACKAGES = (
    *("torch", "jax", "jaxlib", "numpy", "tokenizers", "numba", "triton"),
    *("transformers", "peft", "keras", "grain", "datasets", "liger_kernel", "cut_cross_entropy"),
)
"""Packages whose version decides a figure: the frameworks, and what strategies and workloads call."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
GROUP_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""The limit of a control group, its use, and the lines of `memory.stat` for what the kernel drops on demand: of version
2, and by its folder of version 1."""


def free_bytes() -> int:
    """Return how many bytes of this machine's memory are free; in a container, of what it may have."""
    return min([psutil.virtual_memory().available, *(free for _, free in _limits())])


def free_to_use() -> int:
    """Return how many of the free bytes a case may take."""
    return int(free_bytes() * HOST_SHARE)


def total_bytes() -> int:
    """Return the memory of this machine, or the limit of the container where that is less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def threads() -> int:
    """Return how many threads a worker has: one for each CPU that this process may use, fewer under a quota of time."""
    return min([len(os.sched_getaffinity(0)), *_quotas()])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that this process is in, in bytes, and what of it is free."""
    for controller, group in _groups("memory"):
        limit_file, use_file, reclaimable = GROUP_FILES[controller]
        limit, use = _read(group / limit_file) or "", _read(group / use_file) or ""
        if limit.isdigit() and use.isdigit():  # the limit may be "max"
            lines = (line.split() for line in (_read(group / "memory.stat") or "").splitlines())
            dropped = sum(int(line[1]) for line in lines if line[0] in reclaimable)
            yield int(limit), max(0, int(limit) - int(use) + dropped)


def _quotas() -> Iterator[int]:
    """Yield how many CPUs' time each control group that this process is in may take, rounded up."""
    for controller, group in _groups("cpu"):
        if controller:
            quota, period = (_read(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        else:
            quota, _, period = (_read(group / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # the quota may be "max", or -1
            yield -(-int(quota) // int(period))


def _groups(controller: str) -> Iterator[tuple[str, Path]]:
    """Yield the control groups that this process is in: those of version 2, as "", and of a controller of version 1.

    A container may see its own group as the root, and its path from outside.
    """
    for line in (_read(MEMBERSHIP) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = controller if controllers else ""
        names = [name for name in Path(path).parts if name not in ("/", "..")]
        for depth in range(len(names) + 1):
            yield version, CONTROL_GROUPS.joinpath(version, *names[:depth])


@cache
def facts() -> dict[str, Any]:
    """Describe the machine; the host's name is hashed."""
    return {
        "name": name(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "page_bytes": resource.getpagesize(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "libc": " ".join(platform.libc_ver()),
        "half_precision": sorted(processor.flags() & {"amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16", "f16c"}),
        "gpu": _gpu(),
    }


@cache
def name() -> str:
    """Return a short name that is the same for the same machine: system, CPUs, memory, and a hash of the host."""
    memory = round(psutil.virtual_memory().total / 2**30)
    host = hashlib.sha256(f"{platform.node()}{_read('/etc/machine-id')}{_cpu_model()}".encode()).hexdigest()[:6]
    return f"{platform.system().lower()}-{platform.machine()}-{os.cpu_count()}cpu-{memory}gib-{host}"


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute, without importing them."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


@cache
def commit() -> str:
    """Return the commit of the code that runs, with `-dirty` where files differ.

    Outside git it is what the file `.commit` beside the code says, as a copy of the tree brings it along, or else
    `unversioned`.
    """
    folder = Path(__file__).resolve().parents[2]
    brought = (_read(str(folder / ".commit")) or "unversioned")[:LONGEST_COMMIT]
    if not (folder / ".git").exists():  # one further up is another project's
        return brought
    try:
        head = git(folder, "rev-parse", "--short=12", "HEAD")
        changed = git(folder, "status", "--porcelain", "--", "harness", "strategies", "suites")
    except (OSError, subprocess.SubprocessError):
        return brought
    return f"{head}-dirty" if changed else head


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _chosen(path: str) -> str | None:
    text = _read(path)
    return text.split("[")[1].split("]")[0] if text and "[" in text else text


def _cpu_model() -> str:
    """Return the name of the processor, and what sets it apart from others to which clouds give the same name.

    These are the widest vectors, which it may lack, and products of matrices in 16 bits (AMX), which it may have.
    """
    model = processor.of_processor("model name") or platform.processor() or "unknown"
    if processor.flags() and not processor.is_wide():
        return f"{model} without AVX-512"
    return f"{model} with AMX" if "amx_bf16" in processor.flags() else model


def _gpu() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
