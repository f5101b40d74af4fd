"""Arm a worker's process, run its task through the plugins, write the records; the parent believes nothing else."""

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from harness.contract import plugins
from harness.contract.hooks import hookimpl
from harness.contract.plugins import Plugins
from harness.records import Record, Task, store
from harness.worker import ranks, turns

PR_SET_PDEATHSIG = 1


def arm(parent: int) -> None:
    """Tie this process to its parent's life and make it the kernel's first choice when memory runs out."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def instrument(loaded: Plugins) -> SimpleNamespace:
    """Return the plugin that runs a task as the harness does when no other plugin takes it."""

    @hookimpl(trylast=True)
    def harness_measure(task: Task) -> Record:
        from harness.worker.tasks import run

        return run(task, loaded)

    return SimpleNamespace(harness_measure=harness_measure)


def work(spec: Path, result: Path, loaded: Plugins | None = None) -> int:
    """Run one task, or this rank's part of it; the predictor's many cases each give a line of their own.

    The plugins are loaded here, once a process, unless the process that this one was forked from has loaded them.
    """
    started, rank = time.monotonic(), ranks.own()
    forks = None if loaded is None else work  # where this process is a fork, its ranks can be forks
    task = Task.model_validate_json(spec.read_bytes())
    arm(task.parent)
    loaded = plugins.load(task.plugins) if loaded is None else loaded
    loaded.manager.register(instrument(loaded), "harness.worker")
    with open(result, "wb") as out:
        for case in task.cases:
            one = task.model_copy(update={"cases": (case,)})
            with ExitStack() as joined:
                record = _done(one, rank, loaded, forks, joined)
                last, started = started, time.monotonic()
                lived = started - last - turns.rested()  # of one task, since none with turns has several cases
                origin = record.origin.model_copy(update={"worker_seconds": lived})
                record = record.model_copy(update={"case": case, "origin": origin})
                out.write(store.encoded(record))
                out.flush()  # before a rank leaves the others, who fail by its end
    return int(rank is not None and record.status != "ok")  # by this the launcher ends the other ranks


def _done(task: Task, rank: int | None, loaded: Plugins, forks: ranks.Work | None, joined: ExitStack) -> Record:
    """Return the record of a task: led, done alone, or done as a rank that joins the others in `joined`."""
    if rank is None and ranks.are_processes(task):
        return ranks.lead(task, forks)
    if rank is not None:
        try:
            task = joined.enter_context(ranks.joined(task))
        except Exception as error:
            from harness.worker.failures import failed

            return failed(error, task.case.place)
    record: Record = loaded.manager.hook.harness_measure(task=task)
    return record


def leave(main: Callable[[], int]) -> NoReturn:
    """End the process with what `main` returns or raises, as the interpreter would, but take nothing apart.

    Freeing every module on the way out would cost a tenth of a second.
    """
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads that are no daemons
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code)
