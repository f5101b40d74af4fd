"""Run one case of a plan for its memory, outside of a session: with a budget of its own."""

import os
from collections.abc import Callable
from pathlib import Path

from harness.contract.assembly import environment_of
from harness.contract.plugins import Plugins
from harness.machine import facts
from harness.records import Case, Record, Task, store
from harness.run import bench, prepare_data, runner
from harness.suite.plan import Plan


def measured(case: Case, plan: Plan, plugins: Plugins, names: tuple[str, ...], cache: Path, run_id: str) -> Record:
    """Run a case in a process with its budget, and return what it showed."""
    corpus = prepare_data.of_case(plan, case, plugins, cache)
    task = Task(
        kind="memory",
        cases=(case,),
        run_id=run_id,
        parent=os.getpid(),
        folder="",
        corpora={case.comparison_key: corpus},
        plugins=names,
        steps=plan.suite.memory_steps,
        environment=environment_of(plugins, case),
    )
    record = runner.run(task, facts.threads(), plan.suite.timeout_seconds)[0]
    return record.model_copy(update={"case": case})


def complete(record: Record, plan: Plan, plugins: Plugins, run_id: str) -> Record:
    """Complete a record by what identifies the run."""
    origin, own = bench.origin_of(plan, plugins, run_id), record.origin
    known = {
        "machine": {**origin.machine, **own.machine},
        "worker_seconds": own.worker_seconds,
        "start": own.start,
    }
    return record.model_copy(update={"origin": origin.model_copy(update=known)})


def writer(path: Path, heading: Record) -> Callable[[Record], None]:
    """Return what appends records to a new file under a heading, from the first limit or trial on.

    A file without one has nothing to show, and as the newest it would hide earlier results.
    """
    waiting = [heading]

    def write(record: Record) -> None:
        waiting.append(record)
        if path.exists() or record.limits is not None or record.trial is not None:
            for each in waiting:
                store.append(path, each)
            waiting.clear()

    return write
