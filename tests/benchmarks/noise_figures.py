"""Find where the noise of step times comes from: time one step in processes that are started in several ways.

    python tests/benchmarks/noise_figures.py [--backend torch|jax] [--rounds 24] [--seconds 1800] [--steps 8]

Run it on a quiet machine. A round is one process of each way, in an order drawn anew; it stops after --rounds, or when
a backend has taken --seconds. Logarithms of times are taken as way + round + error, by medians (Tukey's median polish),
so that a few stray processes move nothing. Printed, for three figures of a process's steps: the drift between rounds;
of each way the scatter between processes after it, the scatter of steps within a process, the share of processes more
than 10 % off, page faults per step, and the time relative to the way of today. Scatter and drift are robust: 1.48 times
the median distance from the median.
"""

import argparse
import ctypes
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from harness.contract import plugins
from harness.contract.place import Place
from harness.machine import environment
from harness.records import Case, Task, Times
from harness.records.store import parse

SIZES = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 8192, "batch": 1}
TOKENS = {"torch": 1024, "jax": 256}
"""So many make a step of some 0.1 to 0.3 s on two cores."""
PR_SET_THP_DISABLE = 41
ADDR_NO_RANDOMIZE = 0x0040000
OFF = math.log(1.1)
ROBUST = 1.4826
START = "--start"


def as_today() -> None:
    """Change nothing."""


def without_huge_pages() -> None:
    """Give this process, and what it becomes, pages of the plain size alone."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "huge pages cannot be switched off")


def without_randomisation() -> None:
    """Let what this process becomes have the same addresses every time."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.personality(ctypes.c_ulong(libc.personality(0xFFFFFFFF) | ADDR_NO_RANDOMIZE)) == -1:
        raise OSError(ctypes.get_errno(), "addresses cannot be fixed")


@dataclass(frozen=True)
class Way:
    """How a process is started: what is done before the interpreter, and what is added to its environment."""

    prepare: Callable[[], None] = as_today
    variables: Mapping[str, str] = field(default_factory=dict)


WAYS = {
    "fresh": Way(),
    "bound threads": Way(variables={"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}),
    "no address randomisation": Way(without_randomisation),
    "no huge pages": Way(without_huge_pages),
    "pinned malloc": Way(variables=environment.PINS),
}
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "median": median,
    "minimum": min,
    "mean of the middle half": lambda steps: fmean(sorted(steps)[len(steps) // 4 : len(steps) - len(steps) // 4]),
}


def main() -> int:
    if sys.argv[1:2] == [START]:
        return started(*sys.argv[2:])
    parser = argparse.ArgumentParser(description="Find where the noise of step times comes from.")
    parser.add_argument("--backend", choices=tuple(TOKENS), action="append", help="by default both")
    parser.add_argument("--rounds", type=int, default=24, help="processes of each way, at most")
    parser.add_argument("--seconds", type=float, default=1800.0, help="what a backend may take")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a process")
    options = parser.parse_args()
    for backend in options.backend or TOKENS:
        timed = rounds(backend, options.rounds, options.seconds, options.steps)
        report(backend, timed)
    return 0


def started(way: str, spec: str, result: str) -> int:
    """Become a worker, in the way that is named."""
    WAYS[way].prepare()
    os.execv(sys.executable, [sys.executable, "-m", "harness.worker", spec, result])


def rounds(backend: str, most: int, seconds: float, steps: int) -> dict[str, list[Times]]:
    """Time complete rounds, and return the times of each way; ways that this machine refuses are named and left out."""
    workload = plugins.load().workloads["decoder"]
    shape = workload.shape.model_validate({**SIZES, "tokens": TOKENS[backend]})  # type: ignore[attr-defined]
    place = Place(backend, "cpu")
    case = Case(workload="decoder", shape=shape.model_dump(), place=place, corpus="drawn", tokenizer="none")
    timed: dict[str, list[Times]] = {name: [] for name in WAYS}
    draw, begun = random.Random(backend), time.monotonic()
    for number in range(most):
        for name in draw.sample(sorted(timed), len(timed)):
            process = one(case, WAYS[name], name, steps)
            if process is None:
                del timed[name]
            else:
                timed[name].append(process)
        print(f"{backend}: round {number + 1}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        if time.monotonic() - begun > seconds:
            break
    return timed


def one(case: Case, way: Way, name: str, steps: int) -> Times | None:
    """Time one process; None, and why on the screen, where it fails."""
    task = Task(
        kind="time", cases=(case,), run_id=f"noise-{os.getpid()}", parent=os.getpid(), folder="", steps=steps, warmup=1
    )
    threads = len(os.sched_getaffinity(0))
    variables = environment.variables("time", case.place, task.run_id, threads, None) | dict(way.variables)
    with tempfile.TemporaryDirectory() as folder:
        spec, result = Path(folder) / "task.json", Path(folder) / "result.jsonl"
        spec.write_text(json.dumps({**task.model_dump(mode="json"), "folder": folder}), encoding="utf-8")
        command = [sys.executable, __file__, START, name, str(spec), str(result)]
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        record = parse(result.read_bytes().splitlines()[0]) if result.exists() and result.stat().st_size else None
    if record is not None and record.status == "ok":
        return record.times
    lines = ended.stderr.strip().splitlines() or ["it wrote nothing"]
    print(f"'{name}' is left out: {record.evidence if record is not None else lines[-1]}", file=sys.stderr)
    return None


def report(backend: str, timed: Mapping[str, Sequence[Times]]) -> None:
    """Print a table for each figure of a process."""
    count = min(map(len, timed.values()), default=0)
    if not count or "fresh" not in timed:
        print(f"{backend}: nothing was timed")
        return
    step = median(median(times.step_seconds) for times in timed["fresh"])
    print(f"\n## {backend}: a step of {step:.3f} s, {count} rounds of {len(timed)} processes")
    for name, figure in FIGURES.items():
        logs = {way: [math.log(figure(times.step_seconds)) for times in each[:count]] for way, each in timed.items()}
        levels, drift, residuals = polished(logs)
        print(f"\nA process is the {name} of its steps: drift between rounds {spread(drift):.1%}\n")
        print("| way | between processes | within a process | > 10 % off | faults per step | relative to fresh |")
        print("|:--|--:|--:|--:|--:|--:|")
        for way, rest in residuals.items():
            within = median(spread([math.log(step) for step in times.step_seconds]) for times in timed[way])
            faults = median((times.minor_faults or 0) / len(times.step_seconds) for times in timed[way])
            off = fmean(abs(value) > OFF for value in rest)
            ratio = math.exp(levels[way] - levels["fresh"])
            print(f"| {way} | {spread(rest):.1%} | {within:.1%} | {off:.0%} | {faults:,.0f} | {ratio:.3f} x |")


def polished(
    logs: Mapping[str, Sequence[float]], sweeps: int = 20
) -> tuple[dict[str, float], list[float], dict[str, list[float]]]:
    """Return the level of each way, that of each round, and what is left of each process."""
    rest = {way: list(values) for way, values in logs.items()}
    levels, drift = dict.fromkeys(logs, 0.0), [0.0] * len(next(iter(logs.values())))
    for _ in range(sweeps):
        for way, values in rest.items():
            middle = median(values)
            levels[way] += middle
            rest[way] = [value - middle for value in values]
        for number in range(len(drift)):
            middle = median(values[number] for values in rest.values())
            drift[number] += middle
            for values in rest.values():
                values[number] -= middle
    return levels, drift, rest


def spread(values: Sequence[float]) -> float:
    """Return the robust standard deviation."""
    middle = median(values)
    return ROBUST * median(abs(value - middle) for value in values)


if __name__ == "__main__":
    sys.exit(main())
