"""Arm the process, run the task through the plugins, write the records; the parent believes nothing else."""

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from harness import plugins, records
from harness.hooks import hookimpl
from harness.records import Record, Task

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
    from harness.worker.kinds import run

    return run(task)


def main() -> int:
    """Run one task; the predictor's many cases each give a line of their own."""
    started = time.monotonic()
    spec, result = Path(sys.argv[1]), Path(sys.argv[2])
    task = Task.model_validate_json(spec.read_bytes())
    arm(task.parent)
    loaded = plugins.load(task.plugins)
    loaded.manager.register(sys.modules["__main__"], "harness.worker")
    with open(result, "wb") as out:
        for case in task.cases:
            one = task.model_copy(update={"cases": (case,)})
            record = loaded.manager.hook.harness_measure(task=one)
            record = record.model_copy(update={"case": case, "worker_seconds": time.monotonic() - started})
            out.write(records.encoded(record))
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
