"""Print what a worker costs beyond interpreter start, framework import and the work itself, as a markdown table.

Run it on a quiet machine: `python tests/benchmarks/isolation_figures.py`. It exits with 1 above 0.3 s a worker.
"""

import subprocess
import sys
import time
from statistics import median

from tabulate import tabulate

from harness import Place
from harness.contract import plugins
from harness.machine import environment
from harness.records import Applied, Case, Task
from harness.run import runner

ROUNDS = 5
ALLOWED_SECONDS = 0.3
SHAPE = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 2048, "batch": 2, "tokens": 256}
BARE = """
import time
started = time.perf_counter()
import {framework}
imported = time.perf_counter()
from itertools import islice
from harness import backends, plugins
from harness.contract.assembly import assemble
from harness.records import Case
from harness.contract.loop import training
case = Case.model_validate_json({case!r})
backend = backends.load({framework!r})
parts = assemble(plugins.load(), case)
began = time.perf_counter()
loop = training(parts, backend.prepare(parts), finish=backend.wait)
for loss, _ in islice(loop, {steps}):
    float(loss)
print(imported - started, time.perf_counter() - began)
"""


def timed(command: list[str], env: dict[str, str]) -> tuple[float, str]:
    """Return the wall seconds of a command and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, done.stdout


def extra(place: str, kind: str, strategies: tuple[Applied, ...]) -> dict[str, float]:
    """Return the medians of a worker's wall time and of what it is made of, in seconds."""
    framework = place.split("/")[0]
    workload = plugins.load().workloads["decoder"]
    shape = workload.shape.model_validate(SHAPE).model_dump()  # type: ignore[attr-defined]
    case = Case(
        workload="decoder",
        shape=shape,
        place=Place.parse(place),
        corpus="drawn",
        tokenizer="none",
        strategies=strategies,
    )
    env = environment.variables(kind, case.place, "figures", 2, None)  # type: ignore[arg-type]
    task = Task(kind=kind, cases=(case,), run_id="figures", parent=0, folder="", steps=3, warmup=1)  # type: ignore[arg-type]
    steps = 3 if kind == "memory" else 5
    seen: dict[str, list[float]] = {"worker": [], "start": [], "import": [], "work": []}
    for _ in range(ROUNDS):
        started = time.perf_counter()
        record = runner.run(task, 2, 120)[0]
        assert record.status == "ok", record.evidence
        seen["worker"].append(time.perf_counter() - started)
        seen["start"].append(timed([sys.executable, "-c", "pass"], env)[0])
        bare = BARE.format(framework=framework, case=case.model_dump_json(), steps=steps)
        imported, work = map(float, timed([sys.executable, "-c", bare], env)[1].split())
        seen["import"].append(imported)
        seen["work"].append(work)
    return {name: median(values) for name, values in seen.items()}


def main() -> int:
    rows, worst = [], 0.0
    for place in ("torch/cpu", "jax/cpu"):
        for kind in ("memory", "time"):
            figures = extra(place, kind, ())
            cost = figures["worker"] - figures["start"] - figures["import"] - figures["work"]
            worst = max(worst, cost)
            parts = (figures[name] for name in ("worker", "start", "import", "work"))
            rows.append([place, kind, *(f"{value:.2f}" for value in parts), f"{cost:.2f}"])
    headers = ("place", "worker", "wall s", "interpreter s", "import s", "work s", "isolation s")
    print(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True))
    return int(worst > ALLOWED_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
