"""Check the instrument on this machine: known bytes, the noise between equal runs, and what would spoil figures."""

import json
import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from random import Random
from shutil import which
from statistics import median

import psutil

from harness import backends
from harness.contract.place import NAMES, Place
from harness.contract.plugins import Plugins
from harness.machine import environment, facts, gpu, memory
from harness.machine.checkups import MIB, SIZE, Calibration, Checkup, Finding, Noise
from harness.records import Applied, Case, Record, Task
from harness.records.case import CONTROL
from harness.run import template, turns
from harness.verdicts import blocks
from harness.verdicts.observed import step_time
from harness.verdicts.pooled import pooled

ROUNDS = 6
STEPS, WARMUP = 160, 5
LEAST_DRIVER = 580
"""The first driver for CUDA 13."""
USABLE = "import torch; raise SystemExit(not torch.cuda.is_available())"
"""A program that fails where there is a driver, and no GPU that torch can use: with a build for the CPU, say."""


def examine(plugins: Plugins, tell: Callable[[str], None] = lambda text: None, noise: bool = True) -> Checkup:
    """Examine this machine; `tell` hears what is going on. Takes one or two minutes, most of it for the noise."""
    faults, calibrations = findings(), []  # before its own processes load the machine
    for way in ("anonymous", "mapped file", "child", "torch", "jax", "cuda"):
        tell(f"known bytes: {way}")
        calibrations.append(calibrate(way))
    measured = None
    if noise:
        tell(f"noise: {ROUNDS} rounds of four equal cases")
        measured = aa_noise(plugins)
    utc = datetime.now(UTC).isoformat(timespec="seconds")
    return Checkup(utc, facts.name(), tuple(calibrations), measured, faults)


class Failure(Calibration):
    """A calibration that ended in an error, where nothing that it needs is absent."""


def calibrate(way: str) -> Calibration:
    """Let a fresh process touch 64 MiB in one way, and compare with what the meter saw."""
    backend, device = ("torch", "cuda") if way == "cuda" else (way if way in NAMES else "torch", "cpu")
    if way in (*NAMES, "cuda") and (reason := backends.absent(backend, device)) is not None:
        return Calibration(way, SIZE, None, reason)
    env = environment.variables("memory", Place(backend, device), "doctor", 1, None)
    done = _ran(["-m", "harness.worker.calibration", way, str(SIZE)], env)
    try:
        return Calibration(way, SIZE, int(json.loads(done.stdout)["seen"]))
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines()
        absent = way == "cuda" and _ran(["-c", USABLE], env).returncode != 0
        return (Calibration if absent else Failure)(way, SIZE, None, lines[-1] if lines else "it printed nothing")


def _ran(arguments: Sequence[str], env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def works(checkup: Checkup) -> bool:
    """Check whether every calibration that could be tried saw the bytes."""
    return not any(each.good is False or isinstance(each, Failure) for each in checkup.calibrations)


@template.forking()
def aa_noise(plugins: Plugins, rounds: int = ROUNDS) -> Noise | None:
    """Time four equal cases, the baseline and `nothing` twice each; None where one of them fails.

    They are judged as a comparison is: two are the baselines, and of the two others the one farther off is returned.
    """
    place = next((Place(name, "cpu") for name in NAMES if backends.absent(name, "cpu") is None), None)
    if place is None:
        return None
    workload = plugins.workloads["decoder"]
    shape = workload.shape.model_validate(dict(workload.presets["tiny"]))  # type: ignore[attr-defined]
    plain = Case(workload="decoder", shape=shape.model_dump(), place=place, corpus="drawn", tokenizer="none")
    control = plain.model_copy(update={"strategies": (Applied(name=CONTROL),)})
    members = {"baseline": plain, CONTROL: control, "baseline again": plain, "nothing again": control}
    times: dict[str, dict[tuple[int, int], float]] = {name: {} for name in members}
    within: list[float] = []
    for number in range(rounds):
        for block, names in enumerate(blocks.blocks(list(members), {}, "doctor", number)):
            for name, record in zip(names, _timed([members[name] for name in names], number), strict=True):
                seconds = step_time(record)
                if seconds is None:
                    return None
                times[name][number, block] = seconds
                within.append(_spread(record.times.step_seconds))
    judged = pooled(times)
    speed = max(judged.speeds.values(), key=lambda speed: abs(math.log(speed.ratio)))
    relative = [_relative(each) for each in times.values()]
    drift = _spread([median(each[at] for each in relative if at in each) for at in times["baseline"]])
    return Noise(rounds, speed.ratio, speed.low, speed.high, speed.word, judged.scatter, drift, median(within))


def _relative(seconds: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Divide the times of one member by their median."""
    middle = median(seconds.values())
    return {at: each / middle for at, each in seconds.items()}


def _spread(seconds: Sequence[float]) -> float:
    """Return the robust standard deviation, as a fraction of the median: 1.48 times the median distance from it."""
    middle = median(seconds)
    return 1.4826 * median(abs(each - middle) for each in seconds) / middle


def _timed(cases: Sequence[Case], number: int) -> list[Record]:
    """Time a process of each case, in turns."""
    tasks = [
        Task(
            kind="time",
            cases=(case,),
            run_id=f"doctor-{os.getpid()}",
            parent=os.getpid(),
            folder="",
            steps=STEPS,
            warmup=WARMUP,
            turns=turns.TURNS,
        )
        for case in cases
    ]
    return turns.run(tasks, facts.threads(), 120.0, lambda phase: None, Random(number))


def findings() -> tuple[Finding, ...]:
    """Return what would spoil figures on this machine."""
    return tuple(finding for check in CHECKS for finding in check())


def _peak_reset() -> list[Finding]:
    try:
        memory.reset_peak()
    except OSError:
        fault = "/proc/self/clear_refs cannot be written, so no host peak can be measured"
        return [Finding(fault, "run on Linux with CONFIG_PROC_PAGE_MONITOR, outside a container that hides /proc")]
    return []


def _load() -> list[Finding]:
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cpus / 2:
        return []
    return [Finding(f"the load is {load:.1f} on {cpus} CPUs, so times will scatter", "end what else is running")]


def _steal() -> list[Finding]:
    times = psutil.cpu_times()
    share = getattr(times, "steal", 0.0) / max(sum(times), 1e-9)
    if share <= 0.01:
        return []
    fault = f"other machines took {share:.1%} of the processor's time since the start"
    return [Finding(fault, "use more rounds, or a machine that is not shared")]


def _governor() -> list[Finding]:
    governor = facts.facts()["governor"]
    if governor in (None, "performance"):
        return []
    remedy = "set it to 'performance' (cpupower frequency-set -g performance)"
    return [Finding(f"the frequency governor is '{governor}', so clocks change during a run", remedy)]


def _turbo() -> list[Finding]:
    for path, on in (("intel_pstate/no_turbo", "0"), ("cpufreq/boost", "1")):
        with suppress(OSError):  # it is not there, or its driver is off and answers nothing
            if (Path("/sys/devices/system/cpu") / path).read_text().strip() == on:
                remedy = "compare within one run only, or switch it off"
                return [Finding("turbo is on, so a hot machine is slower", remedy)]
    return []


def _huge_pages() -> list[Finding]:
    if facts.facts()["huge_pages"] != "always":
        return []
    fault = "transparent huge pages are 'always', so sparse writes cost whole 2 MiB pages"
    return [Finding(fault, "set them to 'madvise' in /sys/kernel/mm/transparent_hugepage/enabled")]


def _allocator() -> list[Finding]:
    strange = [name for name in os.environ if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES")]
    faults = [
        Finding(f"{name} is set here; workers do not inherit it", "nothing, unless you rely on it") for name in strange
    ]
    if "glibc" not in str(facts.facts()["libc"]):
        libc = "the C library is not glibc, so its allocator cannot be pinned"
        faults.append(Finding(libc, "take memory figures on a glibc system"))
    return faults


def _frameworks() -> list[Finding]:
    absences = []
    for name in NAMES:
        reason = backends.absent(name, "cpu")
        if reason is not None:
            absences.append(Finding(reason, f"install it to measure {name} places: pip install {name}"))
    return absences


def _gpu() -> list[Finding]:
    absences = [backends.absent(name, "cuda") for name in NAMES if backends.absent(name, "cpu") is None]
    if None not in absences:
        fault = f"{absences[0] if absences else 'no framework is here'}: places on cuda become untested rows"
        return [Finding(fault, "run the same suite on a machine with one; records of both are reported together")]
    if not gpu.visible():
        fault = "CUDA_VISIBLE_DEVICES names no GPU: places on cuda become untested rows"
        return [Finding(fault, "name a GPU there, or unset it")]
    seen = gpu.detect()
    if seen is None:
        fault = "a driver is there, but nvidia-smi does not answer: budgets in JAX, and what is free, are not known"
        return [Finding(fault, "make nvidia-smi visible here; torch and JAX will say whether they find a GPU")]
    faults = []
    if seen.mig:
        fault = "the GPU is cut into instances (MIG), whose memory nvidia-smi does not tell: no budget binds in JAX"
        faults.append(Finding(fault, "name one instance in CUDA_VISIBLE_DEVICES; peaks are measured all the same"))
    if (major := seen.driver.partition(".")[0]).isdigit() and int(major) < LEAST_DRIVER:
        fault = f"the driver is {seen.driver}, and the CUDA 13 builds of torch and JAX need {LEAST_DRIVER} or newer"
        faults.append(Finding(fault, "update the driver, or install builds for CUDA 12"))
    if (state := gpu.state()) is not None and state.others:
        fault = f"{state.others} other program(s) run on the GPU: they take memory and time"
        faults.append(Finding(fault, "end them, or choose another GPU by CUDA_VISIBLE_DEVICES"))
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not any(map(which, ("cc", "gcc", "clang"))) or not header.exists():
        lacking = "C compiler" if header.exists() else "Python.h"
        fault = f"no {lacking} is here, so Triton builds no kernel: rows of fused_loss and of products end in an error"
        faults.append(Finding(fault, "install gcc and the headers of Python, python3-dev"))
    if find_spec("pynvml") is None:
        fault = "nvidia-ml-py is not installed, so what the driver counts for a process is not known"
        faults.append(Finding(fault, "pip install nvidia-ml-py"))
    return faults


def _swap() -> list[Finding]:
    used = psutil.swap_memory().used
    if used < 64 * MIB:
        return []
    return [
        Finding(f"{used // MIB} MiB are swapped out, and swapped pages are not in a peak", "free memory, or swapoff")
    ]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _peak_reset, _load, _steal, _governor, _turbo, _huge_pages, _allocator, _frameworks, _gpu, _swap,
)  # fmt: skip
