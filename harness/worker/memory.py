"""Measure the memory of one case: prime, settle, then the loop, phase by phase."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from harness.backends import Unavailable, nvml
from harness.contract.assembly import assemble, feeds_of, never_called, shape_of, with_probe_knobs
from harness.contract.instruments import digested, metered
from harness.contract.loop import Ending, Phase, training
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.contract.stages import Profile
from harness.contract.toolkit.checkpoints import CheckpointFile
from harness.machine import memory
from harness.machine.environment import regime
from harness.records import Case, Memory, Record, Status, Task
from harness.records import Phase as PhaseRecord
from harness.worker import batch_sizes, notes, ranks, steadiness
from harness.worker.contents import Contents
from harness.worker.device_peaks import DevicePeaks
from harness.worker.failures import failure, origin

COMPARED = {"gather_parameters"}
"""Parts that are called where answers are compared, and not in training."""
FILE_SHARE = 0.01
LINE_BYTES = 512
MIB = 1 << 20
LEAST_UNTOUCHED = 32 * MIB
STEPS = ("first_step", "steady_step")
"""The phases of a step, by how their names begin."""
WITHOUT_TARGET = "; of a batch whose targets are all ignored there is none: take more tokens, or ignore fewer"
NO_RESET = {"peak_host_bytes": "the kernel keeps the mark"}
UNSEEN = "priming and compiling took more of the device than the run, and the allocator's mark has no reset"


class _Watch(NamedTuple):
    """What watches a run: meters of its phases and of its device, its contents, calls of parts, digests of batches."""

    meter: memory.PhaseMeter
    device: DevicePeaks | None
    contents: Contents
    calls: Counter[tuple[str, str]]
    digests: list[str]


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Run the case and return its peaks; memory that runs out becomes a record with the phase it happened in."""
    place = task.case.place
    note_phase = _phase_file(Path(task.folder))
    from_start = None if backend.EAGER else backend.cap(place, task.case.budget_bytes)
    meter = memory.PhaseMeter(lambda meter: note_phase(meter.current, meter.peak_bytes, meter.base.rss))
    device = None if place.device == "cpu" else DevicePeaks(backend, place, meter)
    watch = _Watch(meter, device, _contents(backend, place, meter, device), Counter(), [])
    phase = "prime"
    try:
        note_phase(phase, 0, 0)
        prime(task, plugins, backend)
        parts = _watched(assemble(plugins, task.case, corpus=task.corpus, calls=watch.calls), watch, backend)
        phase = "prime" if backend.EAGER else "compile"
        note_phase(phase, 0, 0)
        step, compiling = _compiled(parts, task, plugins, backend)
    except Unavailable:
        raise
    except Exception as error:
        status, evidence = failure(error, place, from_start)
        return Record(status=status, evidence=evidence | {"phase": phase})
    return _measured(parts, step, compiling, watch, task, plugins, backend)


def _measured(
    parts: Any, step: Any, compiling: dict[str, Any], watch: _Watch, task: Task, plugins: Plugins, backend: Any
) -> Record:
    """Settle, take the base, train under the meters, and return what they read."""
    place = task.case.place
    driver = nvml.opened(place.device, ranks.own() or 0)
    flags = () if memory.settle() else ("unsettled",)
    backend.clear(place)
    context = _context(driver, backend.reserved(place))
    cap = backend.cap(place, task.case.budget_bytes)
    watch.meter.start()
    known = {"feeds": feeds_of(plugins, task.case), **compiling}
    host = memory.mark_is_low()
    if not host and place.device == "cpu":
        return Record(flags=(*flags, "no_reset"), missing=NO_RESET, memory=Memory(**known))
    run = _trained(parts, step, task, backend, watch, driver, cap)
    status, evidence = _ended(run, task.case, watch)
    known |= {
        "driver_device_bytes": driver.peak_bytes,
        "context_device_bytes": context,
        "batches_digests": tuple(watch.digests[: task.steps]) if status == "ok" else (),
    }
    figures = _figures(task, backend, watch, run, host).model_copy(update=known)
    words, numbers = notes.of_run(parts, task, plugins, figures.peak_step) if status == "ok" else ({}, {})
    uncounted, counts = notes.by_kind(watch.contents.counts)
    if status == "ok" and place.device == "cpu" and figures.within_budget is False:
        status, evidence = "oom_budget", _above(figures)
    return Record(
        status=status,
        evidence=evidence,
        flags=(*flags, *(() if host else ("no_reset",)), *_doubts(figures, ranks.in_process(task))),
        missing=_missing(place, figures, driver) | ({} if host else NO_RESET),
        notes=uncounted | words,
        extra=counts | numbers,
        memory=figures,
    )


def _above(figures: Memory) -> dict[str, Any]:
    """Say by how much a run that came to its end took more than its budget, and where."""
    over = (figures.peak_host_bytes or 0) - (figures.budget_bytes or 0)
    return {"message": f"took {over / MIB:,.1f} MiB more than its budget", "phase": figures.peak_phase}


def _watched(parts: Any, watch: _Watch, backend: Any) -> Any:
    """Watch the batches of the parts and what these hold; where a step is eager, its phases as well."""
    parts = watch.contents.watched(digested(parts, watch.digests))
    return metered(parts, watch.meter) if backend.EAGER else parts


def _contents(backend: Any, place: Place, meter: memory.PhaseMeter, device: DevicePeaks | None) -> Contents:
    """Return what reads the sizes of a run's arrays, and its memory after each stage."""
    in_use, most = partial(_in_use, backend, place, meter), partial(_most_of_loss, meter, device)
    return Contents(backend, Profile(in_use, most, backend.tracing))


def _in_use(backend: Any, place: Place, meter: memory.PhaseMeter) -> int:
    """Count the bytes in use now above the base: on the device, or on a CPU in the process."""
    on_device: int | None = backend.in_use(place)
    return memory.read().rss - meter.base.rss if on_device is None else on_device


def _peaks_by_phase(meter: memory.PhaseMeter, device: DevicePeaks | None) -> dict[str, int]:
    """Return the peak of each phase so far: on the device, or on a CPU in the process."""
    return device.of_phase if device is not None else {name: phase.peak_bytes for name, phase in meter.phases.items()}


def _most_of_loss(meter: memory.PhaseMeter, device: DevicePeaks | None) -> int:
    """Return the peak since the loss of the first step began; the update of a parameter ends a phase on the way."""
    before = _peaks_by_phase(meter, device)
    now = memory.read().peak - meter.base.rss if device is None else device.now()
    return max(now, *(before.get(f"first_step/{name}", 0) for name in ("loss", "backward")))


class _Run(NamedTuple):
    """What the loop showed: its losses, the error that ended it, the limit it ran under.

    `line` is where in the code of a plugin the error came from. `peak_step` is the first step whose peak no later one
    exceeds by more than the resolution, from 1.
    """

    losses: list[float]
    error: Exception | None
    line: str | None
    data_bytes: int
    limit_bytes: int | None
    peak_step: int


def _context(driver: nvml.View, reserved: int | None) -> int | None:
    """Return what a process holds on the device beside its allocator: its context; None where that is not known."""
    used = driver.used()
    return None if used is None or reserved is None else max(0, used - reserved)


def _compiled(parts: Any, task: Task, plugins: Plugins, backend: Any) -> tuple[Any, dict[str, Any]]:
    """Return the step, compiled before the base is taken, and what compiling it took; nothing where nothing is."""
    if backend.EAGER:
        return _prepared(parts, task, plugins, backend), {}
    if task.case.place.device == "cpu":
        _drawn_once(task, plugins, backend)
    before, started = memory.read(), time.monotonic()
    with suppress(OSError):  # where no mark can be reset, the whole process is counted
        memory.reset_peak()
    step = _prepared(parts, task, plugins, backend)
    peak = max(0, memory.read().peak - before.rss)
    memory.trim()
    return step, {"compile_peak_bytes": peak, "compile_seconds": time.monotonic() - started}


def _drawn_once(task: Task, plugins: Plugins, backend: Any) -> None:
    """Draw the state and drop it: a program is compiled for each shape, whose code would count as the strategy's.

    With adapters in bfloat16 these took 18 MiB of 137.
    """
    parts = assemble(plugins, task.case, corpus=task.corpus)
    backend.wait(parts.init(parts, None))
    memory.trim()


def _trained(
    parts: Any,
    step: Any,
    task: Task,
    backend: Any,
    watch: _Watch,
    driver: nvml.View,
    cap: int | None,
) -> _Run:
    """Train under the meters and the budget, which is that of each rank."""
    budget, meter, device = task.case.budget_bytes, watch.meter, watch.device

    def peak_so_far() -> int:
        return meter.peak_bytes if device is None else device.highest

    bound = budget * ranks.in_process(task) if budget is not None and device is None else None
    losses: list[float] = []
    error: Exception | None = None
    line: str | None = None
    data_bytes, highest, peak_step = 0, 0, 0
    with nvml.sampled(driver), memory.budget(None if bound is None else bound + untouched(bound)) as limit:
        try:
            ending = _ending(parts, task, backend)
            loop = training(parts, step, _phases(meter, backend), watch.contents.finish, ending)
            for loss, _ in islice(loop, task.steps + (ending is not None)):
                losses.append(float(loss))
                if (peak := peak_so_far()) > highest + memory.resolution_bytes():
                    highest, peak_step = peak, len(losses)
            loop.close()
        except Exception as caught:
            error, data_bytes = caught, memory.read().data  # before anything is freed
            line = origin(caught)
            error.__traceback__ = None
            meter.enter(None)
    return _Run(losses, error, line, data_bytes, limit or cap, peak_step)


def untouched(budget: int) -> int:
    """Return how much more than its budget a process may map, in bytes.

    A budget is of memory that is used, and the limit counts what is mapped. Of 512 MiB of bfloat16 18 were mapped and
    not touched yet. What takes more than its budget and less than the limit is found by its peak.
    """
    return max(LEAST_UNTOUCHED, budget // 16)


def _ending(parts: Any, task: Task, backend: Any) -> Ending | None:
    """Return how a whole run ends, saved in the folder of the task; None for one that ends with its steps."""
    if not getattr(parts.shape, "evaluations", 0):
        return None
    return Ending(task.steps, CheckpointFile(Path(task.folder) / "checkpoint.safetensors", backend.buffer))


def _ended(run: _Run, case: Case, watch: _Watch) -> tuple[Status, dict[str, Any]]:
    """Return how the run ended and the evidence; one without effect, or with losses that are not finite, is none."""
    if run.error is not None:
        status, evidence = failure(run.error, case.place, run.limit_bytes, run.data_bytes, run.line)
        return status, evidence | {"phase": watch.meter.last or "unknown", "steps_done": len(run.losses)}
    idle = never_called(Counter({key: count for key, count in watch.calls.items() if key[1] not in COMPARED}))
    if idle is not None:
        return "error", {"message": idle}
    if not all(map(math.isfinite, run.losses)):
        why = WITHOUT_TARGET if case.shape.get("ignored") and any(map(math.isnan, run.losses)) else ""
        return "invalid_output", {"message": f"losses are not finite: {', '.join(map(str, run.losses))}{why}"}
    return "ok", {} if run.limit_bytes is None else {"limit_bytes": run.limit_bytes}


def _doubts(figures: Memory, in_process: int) -> Iterator[str]:
    """Yield the flags of the figures."""
    if figures.regime == "native":
        yield "native_regime"
    pages = max((phase.file_bytes or 0 for phase in figures.phases), default=0)
    least = max(FILE_SHARE * max(figures.peak_host_bytes or 0, 1), memory.resolution_bytes())
    if pages > least and figures.peak_device_bytes is None:  # beside a device's peak these are libraries
        yield "file_backed"
    if memory.children():
        yield "child_processes"
    if in_process > 1 and figures.peak_device_bytes is None:
        yield "shared_process"


def _missing(place: Place, figures: Memory, driver: nvml.View) -> dict[str, str]:
    """Return the reasons for device figures that are not there."""
    reasons: dict[str, str] = {}
    if figures.peak_device_bytes is None:
        reasons["peak_device_bytes"] = "the place is a CPU" if place.device == "cpu" else UNSEEN
    for name in ("driver_device_bytes", "context_device_bytes"):
        if getattr(figures, name) is None:
            reasons[name] = driver.reason or "the allocator does not tell what it has taken"
    return reasons


def _phases(meter: memory.PhaseMeter, backend: Any) -> Phase:
    """Measure each phase; after one of a compiled step, let the runtime free what it frees in the background."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with meter.phase(name):
            yield
        if not backend.EAGER:
            memory.calm()

    return phase


def prime(task: Task, plugins: Plugins, backend: Any) -> None:
    """Run the whole loop twice at a tiny shape, so that first-use costs lie in the base and not in the strategy.

    Knobs are those of the probe: with its own, a strategy of large chunks would take the plain way there.
    """
    tiny = plugins.workloads[task.case.workload].tiny(shape_of(plugins, task.case))
    case = with_probe_knobs(plugins, task.case, tiny)
    backend.warm(case.place)
    parts = assemble(plugins, case, shape=tiny)
    loop = training(parts, backend.prepare(parts), finish=backend.wait)
    for loss, _ in islice(loop, 2):
        float(loss)
    loop.close()


def _prepared(parts: Any, task: Task, plugins: Plugins, backend: Any) -> Any:
    case = task.case
    if backend.EAGER:
        return backend.prepare(parts)
    plain = assemble(plugins, case, corpus=task.corpus)  # beside the parts whose calls are counted
    batch = batch_sizes.sizes(plugins.workloads[case.workload], plain)
    abstract = assemble(plugins, case, draw=lambda inner: backend.abstract_draw)
    return backend.prepare(parts, backend.like(batch), abstract)


def _phase_file(folder: Path) -> Any:
    """Keep a line on disk that says how far the run came, for a watcher when this process dies."""
    descriptor = os.open(folder / "phase.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(phase: str | None, peak: int, base: int) -> None:
        text = json.dumps({"phase": phase, "peak_bytes": peak, "base": base})
        os.pwrite(descriptor, text.encode()[:LINE_BYTES].ljust(LINE_BYTES), 0)

    return write


def _ends(readings: list[int], steps: int) -> list[int]:
    """Take the reading at the end of each step: where steps are resolved into phases there are more."""
    each = len(readings) // steps if steps else 0
    return readings[each - 1 :: each] if each and len(readings) == each * steps else readings[:0]


def _figures(task: Task, backend: Any, watch: _Watch, run: _Run, host: bool = True) -> Memory:
    """Put together what the meters read; ranks that are devices of this process share its memory.

    Without `host` the kernel reset no mark, so that there are figures of the device alone.
    """
    budget, in_process, meter, device = task.case.budget_bytes, ranks.in_process(task), watch.meter, watch.device
    steady = _ends(meter.readings.get("steady_step", []), task.steps - 1)
    headline = meter.peak_bytes if device is None else device.peaks.get("allocated")
    peak_phase = meter.peak_phase if device is None else device.phase
    init = meter.phases.get("init")
    phases = [PhaseRecord.model_validate(vars(phase)) for phase in meter.phases.values()] if host else []
    figures = Memory(
        regime=regime(),
        resolution_bytes=memory.resolution_bytes(),
        base_rss_bytes=meter.base.rss,
        peak_host_bytes=meter.peak_bytes if host else None,
        peak_phase=peak_phase,
        peak_step=run.peak_step if (peak_phase or "").startswith(STEPS) else None,
        phases=tuple(phases),
        resident_bytes=init.exit_bytes if init else None,
        stages=watch.contents.profile.stages,
        # of several devices, arrays count as one
        kinds=watch.contents.by_kind(_peaks_by_phase(meter, device)) if in_process == 1 else {},
        budget_bytes=budget,
        within_budget=None if budget is None or headline is None else headline <= budget,
        slope_bytes_per_step=steadiness.slope(steady) if len(steady) >= 2 else None,
        losses=tuple(loss for loss in run.losses if math.isfinite(loss)),
        **(device.figures() if device is not None else {}),
    )
    if in_process == 1:
        return figures
    if device is not None:
        return ranks.of_devices(figures, backend.peaks(task.case.place), in_process)
    return ranks.shared(figures, in_process)
