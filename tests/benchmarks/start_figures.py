"""Print what one more case costs beyond its own work, forked and fresh, and how their figures compare.

Run it on a quiet machine: `python tests/benchmarks/start_figures.py [ROUNDS]`. It exits with 1 where a forked case
costs more than is allowed, or its peak is another than that of a fresh one.
"""

import os
import sys
import time
from contextlib import nullcontext
from statistics import median

from tabulate import tabulate

from harness import Place
from harness.contract import plugins
from harness.machine import memory
from harness.records import Case, Record, Task
from harness.run import runner, template

ALLOWED_SECONDS = {"torch/cpu": 0.1, "jax/cpu": 0.2}
SHAPE = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 2048, "batch": 2, "tokens": 256}
MIB = 1 << 20


def once(task: Task, forked: bool, threads: int) -> tuple[float, Record]:
    """Run a task; return the seconds beyond those in which the worker did the task, and its record."""
    with nullcontext() if forked else template.suspended():
        started = time.perf_counter()
        (record,) = runner.run(task, threads, 120)
        seconds = time.perf_counter() - started
    assert record.status == "ok" and record.origin.worker_seconds is not None, record.evidence
    assert record.origin.start == ("forked" if forked else "fresh")
    return seconds - record.origin.worker_seconds, record


def main(rounds: int) -> int:
    workload, threads = plugins.load().workloads["decoder"], len(os.sched_getaffinity(0))
    shape = workload.shape.model_validate(SHAPE).model_dump()  # type: ignore[attr-defined]
    rows, failed = [], False
    for place in ALLOWED_SECONDS:
        case = Case(workload="decoder", shape=shape, place=Place.parse(place), corpus="drawn", tokenizer="none")
        for kind in ("predict", "memory", "time"):
            task = Task(kind=kind, cases=(case,), run_id="figures", parent=0, folder="", steps=5, warmup=2)
            seen: dict[bool, list[tuple[float, Record]]] = {True: [], False: []}
            with template.forking():
                once(task, True, threads)  # starts the template
                for number in range(rounds):
                    for forked in (True, False) if number % 2 else (False, True):
                        seen[forked].append(once(task, forked, threads))
            cost = {way: median(seconds for seconds, _ in seen[way]) for way in seen}
            peaks = {way: median(_peak(record) for _, record in seen[way]) for way in seen}
            steps = {way: median(_step(record) for _, record in seen[way]) for way in seen}
            apart = peaks[True] - peaks[False]
            failed |= cost[True] > ALLOWED_SECONDS[place] or (
                kind == "memory" and abs(apart) > memory.resolution_bytes()
            )
            ratio = f"{steps[True] / steps[False]:.3f}" if kind == "time" else ""
            works = [median(record.origin.worker_seconds or 0 for _, record in seen[way]) for way in (True, False)]
            rows.append([place, kind, *(f"{cost[way]:.3f}" for way in seen), *(f"{work:.2f}" for work in works)])
            rows[-1] += [f"{peaks[True] / MIB:.2f}", f"{peaks[False] / MIB:.2f}", f"{apart / MIB:+.3f}", ratio]
    headers = ("place", "worker", "forked s", "fresh s", "work forked s", "work fresh s", "peak forked MiB")
    print(
        tabulate(rows, (*headers, "peak fresh MiB", "apart MiB", "step ratio"), tablefmt="pipe", disable_numparse=True)
    )
    return int(failed)


def _peak(record: Record) -> int:
    timed = record.times.native_peak_host_bytes
    return record.memory.peak_host_bytes or timed or record.prediction.predicted_peak_bytes or 0


def _step(record: Record) -> float:
    return median(record.times.step_seconds or (1.0,))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
