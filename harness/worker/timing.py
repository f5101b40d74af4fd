"""Time one case: prime, settle, then the bare loop with nothing but a clock."""

import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from harness.contract.assembly import assemble
from harness.contract.loop import training
from harness.contract.parts import Parts
from harness.contract.plugins import Plugins
from harness.machine.environment import regime
from harness.machine.memory import mark_is_low, read, reset_peak, settle
from harness.records import Record, Task, Times
from harness.worker import batch_sizes, memory, ranks, steadiness, turns

PILOT_STEPS, PILOT_SECONDS = 30, 10.0


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Time the first step apart, warm up, then time every step; a pilot finds how many of each there should be."""
    case, place = task.case, task.case.place
    if backend.EAGER:  # a compiled step brings its own first use: it is compiled before the base is taken
        memory.prime(task, plugins, backend)
    parts = assemble(plugins, case, corpus=task.corpus)
    step = backend.prepare(
        parts,
        None if backend.EAGER else backend.like(batch_sizes.sizes(plugins.workloads[case.workload], parts)),
        assemble(plugins, case, draw=lambda inner: backend.abstract_draw),
    )
    epoch = batch_sizes.of_epoch(plugins.workloads[case.workload], parts)
    steps_due = task.steps
    if epoch is not None:
        parts, steps_due = _of_first_epoch(parts), _whole_epochs(task.steps, len(epoch.shapes))
    settled = settle()
    backend.clear(place)
    backend.cap(place, case.budget_bytes)
    base = read().rss
    has_mark = _reset_mark()
    fetches = _Fetches()
    loop = training(parts, step, fetches.phase, backend.finish)
    warmup = 0 if task.kind == "pilot" else task.warmup
    wall, usage = None, dict[str, Any]()
    if task.kind == "pilot":
        steps = backend.seconds(_pilot(loop, backend))
        first = steps[0]
    else:
        first, steps, wall, usage = _timed(loop, backend, task, warmup, steps_due)
    loop.close()
    peak = read().peak
    evidence = _lateness(steps, wall)
    alone = task.turns == 1  # over its turns a machine drifts, and over uneven batches so do steps
    noisy = len(steps) > 1 and alone and epoch is None and steadiness.noisy(steps)
    figures = Times(
        regime=regime(),
        base_rss_bytes=base,
        native_peak_host_bytes=(peak - base) // ranks.in_process(task) if has_mark else None,
        first_step_seconds=first,
        step_seconds=tuple(steps),
        uneven=epoch is not None,
        fetch_seconds=tuple(fetches.seconds[-len(steps) :] if steps else ()),
        prepare_seconds=tuple(fetches.windows),
        warmup_steps=warmup,
        **usage,
    )
    flags = (*(() if settled else ("unsettled",)), *(("noisy",) if noisy else ()))
    return Record(status="error" if evidence else "ok", evidence=evidence, flags=flags, times=figures)


def _reset_mark() -> bool:
    """Reset the mark of the host's memory; return whether the kernel did."""
    try:
        reset_peak()
    except OSError:
        return False
    return mark_is_low()


def _lateness(steps: list[float], wall: float | None) -> dict[str, Any]:
    """Return the evidence that steps did not last as long as the clock on the wall says, where that is known."""
    if not steps or wall is None or steadiness.synchronised(steps, wall):
        return {}
    return {"message": f"not synchronised: {sum(steps):.3g} s of steps in {wall:.3g} s of wall"}


def _of_first_epoch(parts: Parts) -> Parts:
    """Put each epoch in the order of the first: as many steps as it has take all its batches, wherever they begin."""
    inner = parts.order
    return replace(parts, order=lambda parts, source, epoch: inner(parts, source, 0))


def _whole_epochs(steps: int, epoch: int) -> int:
    """Round a number of steps up to whole epochs: only these have the same batches in whatever order."""
    return -(-steps // epoch) * epoch


class _Fetches:
    """Clock how long the loop waits for each batch, and how long the windows took to make."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.windows: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if name in ("batches", "windows"):
            clocked = self.seconds if name == "batches" else self.windows
            clocked.append(time.perf_counter() - started)


def _pilot(loop: Iterator[Any], backend: Any) -> list[Any]:
    """Take up to 30 steps, or the first, before which windows are made and programs compiled, and 10 seconds more."""
    marks = [backend.finish(None)]
    started = None
    for _, mark in islice(loop, PILOT_STEPS):
        marks.append(mark)
        if started is None:
            started = time.monotonic()
        elif backend.agreed(time.monotonic() - started > PILOT_SECONDS):
            break
    return marks


def _timed(
    loop: Iterator[Any], backend: Any, task: Task, warmup: int, steps: int
) -> tuple[float, list[float], float, dict[str, Any]]:
    """Take the first step, the warm-up, then the timed steps without the collector, in the turns of the task.

    Return the seconds of the first step, those of each timed one and their wall time, and what else the process used.
    """
    marks = [backend.finish(None)]
    taken = list(islice(loop, 1 + warmup))
    marks += [mark for _, mark in taken]
    backend.wait(taken[-1][0])
    first = backend.seconds(marks)[0]
    del taken
    gc.collect()
    gc.freeze()
    gc.disable()
    seconds: list[float] = []
    wall = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF)
    shares = _shares(steps, min(task.turns, task.steps))
    for share in shares:
        if task.turns > 1:
            turns.wait(task.folder)
        marks, started = [backend.finish(None)], time.perf_counter()
        last = None
        for last, mark in islice(loop, share):  # noqa: B007 - waited for below
            marks.append(mark)
        backend.wait(last)
        del last
        wall += time.perf_counter() - started
        seconds += backend.seconds(marks)
    after = resource.getrusage(resource.RUSAGE_SELF)
    gc.enable()
    return first, seconds, wall, _used(before, after) | {"turns": len(shares), "rest_seconds": turns.rested()}


def _shares(steps: int, turns: int) -> list[int]:
    """Part so many steps into turns of about as many each; whole epochs may be more steps than were asked for."""
    return [steps * (turn + 1) // turns - steps * turn // turns for turn in range(turns)]


def _used(before: resource.struct_rusage, after: resource.struct_rusage) -> dict[str, Any]:
    """Return what a process used between two readings: processor time in seconds, page faults, context switches."""
    return {
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "major_faults": after.ru_majflt - before.ru_majflt,
        "switches": after.ru_nivcsw - before.ru_nivcsw,
    }
