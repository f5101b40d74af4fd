"""Run one case of a plan for its memory, outside of a session: with a budget of its own."""

import os
from datetime import UTC, datetime
from pathlib import Path

from harness.contract.assembly import environment_of
from harness.contract.plugins import Plugins
from harness.machine import facts
from harness.records import Case, Record, Task
from harness.run import prepare_data, runner
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
    record = runner.run(task, len(os.sched_getaffinity(0)), plan.suite.timeout_seconds)[0]
    return record.model_copy(update={"case": case})


def complete(record: Record, plan: Plan, run_id: str) -> Record:
    """Complete a record by what identifies the run."""
    known = {
        "suite": plan.name,
        "run_id": run_id,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**facts.facts(), **record.origin.machine},
        "commit": facts.commit(),
    }
    return record.model_copy(update={"origin": record.origin.model_copy(update=known)})
