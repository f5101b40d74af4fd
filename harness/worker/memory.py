"""Measure the memory of one case: prime, settle, then the loop, phase by phase."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from harness.backends import nvml
from harness.contract.assembly import assemble, feeds_of, never_called, shape_of, with_probe_knobs
from harness.contract.data import Extent, Source
from harness.contract.instruments import digested, metered
from harness.contract.loop import Phase, training
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import memory
from harness.machine.environment import regime
from harness.records import Phase as PhaseRecord
from harness.records import Record, Task
from harness.worker import ranks, steadiness
from harness.worker.tasks import failed

COMPARED = {"gather_parameters"}
"""Parts that are called where answers are compared, and not in training."""
FILE_SHARE = 0.01
ORDER_LIMIT = 20_000_000
"""Windows of an epoch up to which its order is looked at: a few arrays of that length are made."""
LINE_BYTES = 512


def measure(task: Task, plugins: Plugins, backend: Any) -> Record:
    """Run the case and return its peaks; memory that runs out becomes a record with the phase it happened in."""
    place = task.case.place
    tell = _phase_file(Path(task.folder))
    tell("prime", 0, 0)
    try:
        prime(task, plugins, backend)
    except Exception as caught:
        record = failed(caught, place)
        return record.model_copy(update={"evidence": {**record.evidence, "phase": "prime"}})
    calls: Counter[tuple[str, str]] = Counter()
    digests: list[str] = []
    parts = digested(assemble(plugins, task.case, corpus=task.corpus, calls=calls), digests)
    meter = memory.PhaseMeter(lambda meter: tell(meter.current, meter.peak_bytes, meter.base.rss))
    if backend.EAGER:
        parts = metered(parts, meter)
    step, compile_peak = _compiled(parts, task, plugins, backend)
    flags = [] if memory.settle() else ["unsettled"]
    backend.clear(place)
    record, losses = _metered(parts, step, task, backend, meter, flags)
    given = {"feeds": feeds_of(plugins, task.case), "compile_peak_bytes": compile_peak}
    record = record.model_copy(update=given)
    if record.status == "ok" and "no_reset" not in record.flags:
        record = _checked(record, losses, calls)
        if record.status == "ok":
            record = record.model_copy(update=_observed(parts, task, plugins, losses, digests))
    return record


def _compiled(parts: Any, task: Task, plugins: Plugins, backend: Any) -> tuple[Any, int | None]:
    """Give the step, compiled before the base is taken, and the peak of compiling it; None where nothing is."""
    before = memory.read()
    memory.reset_peak()
    step = _prepared(parts, task, plugins, backend)
    if backend.EAGER:
        return step, None
    peak = max(0, memory.read().peak - before.rss)
    memory.trim()
    return step, peak


def _metered(
    parts: Any, step: Any, task: Task, backend: Any, meter: memory.PhaseMeter, flags: list[str]
) -> tuple[Record, list[float]]:
    """Train under the meters and the budget, which is that of each rank; give what they read, and the losses."""
    place, budget, here = task.case.place, task.case.budget_bytes, ranks.in_process(task)
    on_cpu = place.device == "cpu"
    device = _DevicePeaks(backend, place, meter)
    cap = backend.cap(place, budget)
    meter.start()
    if not meter.reset_works():
        return Record(flags=("no_reset",), missing={"peak_host_bytes": "the kernel keeps the mark"}), []
    losses: list[float] = []
    error: Exception | None = None
    held = 0
    bound = budget * here if budget is not None and on_cpu else None
    with nvml.sampled(place.device) as seen, memory.budget(bound) as limit:
        try:
            loop = training(parts, step, _phases(meter, backend), backend.wait)
            for loss, _ in islice(loop, task.steps):
                losses.append(float(loss))
            loop.close()
        except Exception as caught:
            error, held = caught, memory.read().data  # before anything is freed
            error.__traceback__ = None
            meter.enter(None)
    record = _record(budget, meter, device, flags, place, limit or cap, task.steps)
    if here > 1:
        record = ranks.shared(record, here) if on_cpu else ranks.of_devices(record, backend.peaks(place)[:here])
    missing = {} if seen.peak_bytes is not None else {"driver_device_bytes": seen.reason}
    record = record.model_copy(
        update={"driver_device_bytes": seen.peak_bytes, "missing": {**record.missing, **missing}}
    )
    if error is not None:
        at_phase = {"phase": meter.last or "unknown", "steps_done": len(losses)}
        record = failed(error, place, record, limit or cap, held)
        finite = tuple(loss for loss in losses if math.isfinite(loss))
        record = record.model_copy(update={"evidence": {**record.evidence, **at_phase}, "losses": finite})
    return record, losses


def _checked(record: Record, losses: list[float], calls: Counter[tuple[str, str]]) -> Record:
    """Let a run that called a rewritten part never, or whose losses are not finite, be none."""
    idle = never_called(Counter({key: count for key, count in calls.items() if key[1] not in COMPARED}))
    if idle is not None:
        return record.model_copy(update={"status": "error", "evidence": {"message": idle}})
    if not all(math.isfinite(loss) for loss in losses):
        told = f"losses are not finite: {', '.join(map(str, losses))}"
        return record.model_copy(update={"status": "invalid_output", "evidence": {"message": told}})
    return record


def _observed(parts: Any, task: Task, plugins: Plugins, losses: list[float], digests: list[str]) -> dict[str, Any]:
    """Give what a run showed besides its memory."""
    orders = any("order" in plugins.strategies[applied.name].rewrites for applied in task.case.strategies)
    notes, figures = noted(parts, _extent(task, plugins) if orders else None)
    return {
        "losses": tuple(losses),
        "batches_digests": tuple(digests[: task.steps]),
        "notes": notes,
        "extra": figures,
    }


def _extent(task: Task, plugins: Plugins) -> Extent | None:
    workload = plugins.workloads[task.case.workload]
    if workload.extent is None:
        return None
    return workload.extent(shape_of(plugins, task.case), task.corpus, task.steps)


def noted(parts: Any, extent: Extent | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Part what the parts noted into words and numbers; with an extent, add how random the order of an epoch is."""
    notes = {name: note for name, note in parts.notes.items() if isinstance(note, str)}
    figures = {name: note for name, note in parts.notes.items() if not isinstance(note, str)}
    if extent is not None and extent.count <= ORDER_LIMIT:
        import numpy as np

        from harness.workloads.data import shuffle_quality

        rows = np.broadcast_to(np.zeros(1, np.uint8), extent.rows)
        shuffle = bool(getattr(parts.shape, "shuffle", False))
        source = Source(rows, rows, extent.window, extent.stride, extent.batch, shuffle=shuffle)
        epoch = parts.order(parts, source, 0)(0, extent.count)
        figures["shuffle_quality"] = shuffle_quality.quality(epoch)
        figures["epoch_coverage"] = shuffle_quality.coverage(epoch, extent.count)
    return notes, figures


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
    case = with_probe_knobs(plugins, task.case)
    backend.warm(case.place)
    workload = plugins.workloads[case.workload]
    parts = assemble(plugins, case, shape=workload.tiny(shape_of(plugins, case)))
    loop = training(parts, backend.prepare(parts), finish=backend.wait)
    for loss, _ in islice(loop, 2):
        float(loss)
    loop.close()


def _prepared(parts: Any, task: Task, plugins: Plugins, backend: Any) -> Any:
    case = task.case
    batch = plugins.workloads[case.workload].abstract_batch(shape_of(plugins, case))
    abstract = assemble(plugins, case, draw=lambda inner: backend.abstract_draw)
    return backend.prepare(parts, backend.like(batch) if not backend.EAGER else None, abstract)


def _phase_file(folder: Path) -> Any:
    """Keep a line on disk that says how far the run came, for a watcher when this process dies."""
    descriptor = os.open(folder / "phase.json", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(phase: str | None, peak: int, base: int) -> None:
        text = json.dumps({"phase": phase, "peak_bytes": peak, "base": base})
        os.pwrite(descriptor, text.encode()[:LINE_BYTES].ljust(LINE_BYTES), 0)

    return write


class _DevicePeaks:
    """Read and reset the device's counters at every boundary of the host's phases."""

    def __init__(self, backend: Any, place: Place, meter: memory.PhaseMeter) -> None:
        self.peaks: dict[str, int] = {}
        self.phase: str | None = None
        self._backend, self._place, self._running = backend, place, meter.current
        if place.device != "cpu":
            inner = meter.on_change

            def turn(meter: memory.PhaseMeter) -> None:
                inner(meter)
                self._turn(meter.current)

            meter.on_change = turn

    def _turn(self, entered: str | None) -> None:
        for name, value in self._backend.peak(self._place).items():
            if value > self.peaks.get(name, 0):
                self.peaks[name] = value
                if name == "allocated":
                    self.phase = self._running
        self._backend.reset_peak(self._place)
        self._running = entered


def _ends(readings: list[int], steps: int) -> list[int]:
    """Take the reading at the end of each step: where steps are resolved into phases there are more."""
    each = len(readings) // steps if steps else 0
    return readings[each - 1 :: each] if each and len(readings) == each * steps else readings[:0]


def _record(
    budget: int | None,
    meter: memory.PhaseMeter,
    device: _DevicePeaks,
    flags: list[str],
    place: Place,
    limit: int | None,
    steps: int,
) -> Record:
    peak = meter.peak_bytes
    phases = tuple(PhaseRecord.model_validate(vars(phase)) for phase in meter.phases.values())
    file_growth = max((phase.file_bytes or 0 for phase in phases), default=0)
    if regime() == "native":
        flags.append("native_regime")
    if file_growth > FILE_SHARE * max(peak, 1) and file_growth > memory.resolution_bytes():
        flags.append("file_backed")
    if memory.children():
        flags.append("child_processes")
    steady = _ends(meter.readings.get("steady_step", []), steps - 1)
    on_device = place.device != "cpu"
    headline = device.peaks.get("allocated") if on_device else peak
    init = meter.phases.get("init")
    return Record(
        regime=regime(),
        resolution_bytes=memory.resolution_bytes(),
        base_rss_bytes=meter.base.rss,
        peak_host_bytes=peak,
        peak_phase=device.phase if on_device and device.phase else meter.peak_phase,
        phases=phases,
        resident_bytes=init.exit_bytes if init else None,
        budget_bytes=budget,
        within_budget=None if budget is None or headline is None else headline <= budget,
        slope_bytes_per_step=steadiness.slope(steady) if len(steady) >= 2 else None,
        peak_device_bytes=device.peaks.get("allocated"),
        requested_device_bytes=device.peaks.get("requested"),
        reserved_device_bytes=device.peaks.get("reserved"),
        allocation_retries=device.peaks.get("retries"),
        missing={} if on_device else {"peak_device_bytes": "the place is a CPU"},
        flags=tuple(flags),
        evidence={} if limit is None else {"limit_bytes": limit},
    )
