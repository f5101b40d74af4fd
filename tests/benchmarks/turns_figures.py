"""Compare processes that take turns with those that run one after the other: equal ones, by how much they differ.

    python tests/benchmarks/turns_figures.py [--backend torch|jax] [--rounds 12] [--turns 1 2 4 8 16 32 64]
        [--members 4] [--steps 64]

Run it on a quiet machine. A round is a block of equal processes for each number of turns; with 1 they run one after the
other. What one process says is its step time, as in every table. Of its logarithm the mean of its block is taken away:
printed are the scatter of what is left, robust (1.48 times the median distance from 0) and as a standard deviation, the
largest distance, and the seconds of a round. A number of turns that halves the scatter needs a quarter of the rounds.
"""

import argparse
import math
import os
import random
import time
from collections import defaultdict
from statistics import fmean, median

from harness.contract import plugins
from harness.contract.place import Place
from harness.records import Case, Task
from harness.run import template, turns
from harness.verdicts.observed import step_time

SIZES = {"layers": 2, "width": 128, "heads": 4, "vocabulary": 4096, "batch": 1, "tokens": 512}
ROBUST = 1.4826


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare processes that take turns with those that do not.")
    parser.add_argument("--backend", choices=("torch", "jax"), action="append", help="by default both")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--members", type=int, default=4, help="equal processes of a block")
    parser.add_argument("--steps", type=int, default=64, help="timed steps of each process")
    options = parser.parse_args()
    for backend in options.backend or ("torch", "jax"):
        task, draw = of(backend, options.steps), random.Random(backend)
        left: dict[int, list[float]] = defaultdict(list)
        seconds: dict[int, float] = defaultdict(float)
        with template.forking():
            for _ in range(options.rounds):
                for count in draw.sample(options.turns, len(options.turns)):
                    begun = time.monotonic()
                    left[count] += apart(task.model_copy(update={"turns": count}), options.members, draw)
                    seconds[count] += time.monotonic() - begun
        print(f"{backend}, {options.rounds} rounds of {options.members} equal processes of {options.steps} steps")
        print("| turns | scatter | standard deviation | largest | seconds a round |\n|--:|--:|--:|--:|--:|")
        for count in options.turns:
            errors = left[count]
            robust = ROBUST * median(map(abs, errors))
            deviation = math.sqrt(fmean(error * error for error in errors))
            print(
                f"| {count} | {robust:.1%} | {deviation:.1%} | {max(map(abs, errors)):.1%} "
                f"| {seconds[count] / options.rounds:.1f} |"
            )


def of(backend: str, steps: int) -> Task:
    """Return the task that all processes have."""
    shape = plugins.load().workloads["decoder"].shape.model_validate(SIZES)  # type: ignore[attr-defined]
    place = Place(backend, "cpu")
    case = Case(workload="decoder", shape=shape.model_dump(), place=place, corpus="drawn", tokenizer="none")
    return Task(
        kind="time", cases=(case,), run_id=f"turns-{os.getpid()}", parent=os.getpid(), folder="", steps=steps, warmup=1
    )


def apart(task: Task, members: int, draw: random.Random) -> list[float]:
    """Time equal processes; return the logarithm of each one's step time without the mean of all."""
    threads = len(os.sched_getaffinity(0))
    records = turns.run([task] * members, threads, 120.0, lambda phase: None, draw)
    logs = [math.log(seconds) for record in records if (seconds := step_time(record))]
    return [value - fmean(logs) for value in logs]


if __name__ == "__main__":
    main()
