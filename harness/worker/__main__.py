"""Arm the process, run the task through the plugins, write the records; the parent believes nothing else."""

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from harness.contract import plugins
from harness.contract.hooks import hookimpl
from harness.records import Record, Task, store
from harness.worker import ranks

PR_SET_PDEATHSIG = 1


def arm(parent: int) -> None:
    """Tie this process to its parent's life and make it the kernel's first choice when memory runs out."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@hookimpl(trylast=True)
def harness_measure(task: Task) -> Record:
    """Run a task as the harness does when no plugin takes it."""
    from harness.worker.tasks import run

    return run(task)


def main() -> int:
    """Run one task, or this rank's part of it; the predictor's many cases each give a line of their own."""
    started, rank = time.monotonic(), ranks.own()
    spec, result = Path(sys.argv[1]), Path(sys.argv[2].format(rank))
    task = Task.model_validate_json(spec.read_bytes())
    arm(task.parent)
    loaded = plugins.load(task.plugins)
    loaded.manager.register(sys.modules["__main__"], "harness.worker")
    with open(result, "wb") as out:
        for case in task.cases:
            one = task.model_copy(update={"cases": (case,)})
            with nullcontext(one) if rank is None else ranks.joined(one) as given:
                leads = rank is None and ranks.are_processes(one)
                record = ranks.lead(one) if leads else loaded.manager.hook.harness_measure(task=given)
                origin = record.origin.model_copy(update={"worker_seconds": time.monotonic() - started})
                record = record.model_copy(update={"case": case, "origin": origin})
                out.write(store.encoded(record))
                out.flush()  # before a rank leaves the others, who fail by its end
    return int(rank is not None and record.status != "ok")  # by this the launcher ends the other ranks


if __name__ == "__main__":
    sys.exit(main())
