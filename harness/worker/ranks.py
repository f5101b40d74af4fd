"""A case on several ranks: start them, end all with the first that fails, and join what they saw.

The worker leads and measures nothing itself. Where it was forked, which its template has found safe, the ranks are
forks of it; else torch's launcher starts a fresh process for each. Each rank runs the same task as a case in one
process does, and leaves a record of its own.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import backends
from harness.machine.memory import kernel_kills
from harness.records import Memory, Phase, Rank, Record, Task
from harness.records.store import parse
from harness.worker import forked

VARIABLE = "RANK"
"""Set by the launcher in the environment of each rank."""
SPEC, RESULT, MEETING = "rank.json", "rank-{}.jsonl", "meeting"
ENDINGS = ("oom_host", "oom_device", "oom_budget", "killed_unknown", "crash")
"""How a rank ends by itself, the surest first: a crash may be that of a library that misses a peer."""
LOST_PEER = re.compile("gloo/transport|by peer|remote process|connection was likely closed|broken pipe", re.IGNORECASE)
"""What gloo, NCCL and torch's store say to a rank whose peer is gone."""


def own() -> int | None:
    """Return the rank of this process, None where it is none."""
    rank = os.environ.get(VARIABLE)
    return None if rank is None else int(rank)


def are_processes(task: Task) -> bool:
    """Check whether the ranks of a task are processes; a prediction pretends to have them."""
    return task.kind != "predict" and backends.processes(task.case.place.backend, task.case.ranks) > 1


def in_process(task: Task) -> int:
    """Count the ranks that the process of a task has: where they are its devices all, else its own."""
    return task.case.ranks // backends.processes(task.case.place.backend, task.case.ranks)


@contextmanager
def joined(task: Task) -> Iterator[Task]:
    """Make this process one of the ranks of a task, with a folder of its own; gloo on the CPU, NCCL on GPUs.

    Raises Unavailable where there are fewer GPUs than ranks.
    """
    import torch
    import torch.distributed as dist

    rank = own() or 0
    folder = Path(task.folder, f"rank-{rank}") if rank else Path(task.folder)
    folder.mkdir(exist_ok=True)
    on_gpu = task.case.place.device == "cuda"
    if on_gpu:
        if (count := torch.cuda.device_count()) < task.case.ranks:
            raise backends.Unavailable(f"{task.case.ranks} ranks need as many GPUs, and torch finds {count}")
        torch.cuda.set_device(rank)
    meeting = None if dist.is_torchelastic_launched() else Path(task.folder, MEETING).absolute().as_uri()
    dist.init_process_group("nccl" if on_gpu else "gloo", meeting, rank=rank, world_size=task.case.ranks)
    try:
        yield task.model_copy(update={"folder": str(folder)})
    finally:
        dist.destroy_process_group()


Work = Callable[[Path, Path], int]
"""Does a task in one process and leaves its records; returns 0 where all is well."""


def lead(task: Task, work: Work | None) -> Record:
    """Start the ranks of a case, wait for them, and give one record: of all, or of the one whose failure ended it.

    With `work` each rank is a fork that does it; without, a fresh process.
    """
    folder, kills = Path(task.folder), kernel_kills()
    for left in (folder / MEETING, *(folder / RESULT.format(rank) for rank in range(task.case.ranks))):
        left.unlink(missing_ok=True)  # by the ranks of the task's case before
    spec = task.model_copy(update={"parent": os.getpid()})
    (folder / SPEC).write_text(spec.model_dump_json(), encoding="utf-8")
    paths = str(folder / SPEC), str(folder / RESULT)
    codes = _launched(task, paths) if work is None else _forked(task, work, paths)
    records = _left(folder, task.case.ranks)
    if len(records) == task.case.ranks and all(record.status == "ok" for record in records.values()):
        return together([records[rank] for rank in range(task.case.ranks)])
    return cause(records, codes, task.case.ranks, kernel_kills() > kills)


def _launched(task: Task, paths: tuple[str, str]) -> dict[int, int]:
    """Start each rank as a fresh process; return how those that failed have ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=task.case.ranks,
        run_id=task.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "harness.worker", *paths)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _forked(task: Task, work: Work, paths: tuple[str, str]) -> dict[int, int]:
    """Fork each rank from this process; return how those that failed have ended."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

    ranks, ranges = task.case.ranks, forked.mapped_ranges()
    context = start_processes(_be_rank, (ranks, work, ranges, *paths), ranks, join=False, start_method="fork")
    with suppress(ProcessExitedException, ProcessRaisedException):
        while not context.join():
            pass
    return {rank: process.exitcode for rank, process in enumerate(context.processes) if process.exitcode}


def _be_rank(rank: int, ranks: int, work: Work, ranges: forked.Ranges, spec: str, result: str) -> None:
    """Do a rank's work in a fork of its leader."""
    os.environ |= {VARIABLE: str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    forked.complete(ranges)
    if code := work(Path(spec), Path(result.format(rank))):
        sys.exit(code)


def _left(folder: Path, ranks: int) -> dict[int, Record]:
    """Read the records that ranks left, in the order in which they were written."""
    left: list[tuple[int, int, Record]] = []
    for rank in range(ranks):
        path = folder / RESULT.format(rank)
        with suppress(OSError, ValueError):
            left.append((path.stat().st_mtime_ns, rank, parse(path.read_bytes())))
    return {rank: record for _, rank, record in sorted(left, key=lambda each: each[:2])}


def cause(records: Mapping[int, Record], codes: Mapping[int, int], ranks: int, kernel_killed: bool) -> Record:
    """Return the failure that ended a case, in whatever order ranks reported theirs; of equals the first.

    A rank that ran out of memory, was killed or crashed ends the others; what these say is that their peer is gone.
    One that misses another which ended well waited for what that did not call.
    """
    failures = [_of_rank(rank, ranks, record) for rank, record in records.items() if record.status != "ok"]
    silent = [rank for rank in dict.fromkeys([*codes, *range(ranks)]) if rank not in records]
    failures += [_without_record(rank, ranks, codes.get(rank), kernel_killed) for rank in silent]
    failure = min(failures, key=_order)
    if len(failures) == ranks or not LOST_PEER.search(failure.evidence["message"]):
        return failure
    rank = failure.evidence["rank"]
    message = f"rank {rank} of {ranks} waits for one that has ended well: let every rank call each collective"
    return failure.model_copy(update={"evidence": {**failure.evidence, "message": message}})


def _order(failure: Record) -> int:
    """Return how likely it is that a failure follows from another one: the cause has the lowest number."""
    if failure.status in ENDINGS:
        return ENDINGS.index(failure.status)
    if "exit_code" in failure.evidence:  # one that the launcher ended shows no cause
        by_launcher = failure.evidence["exit_code"] in (None, -signal.SIGTERM)
        return len(ENDINGS) + (3 if by_launcher else 0)
    return len(ENDINGS) + (2 if LOST_PEER.search(failure.evidence.get("message", "")) else 1)


def _of_rank(rank: int, ranks: int, record: Record) -> Record:
    """Name the rank in the record that it left."""
    message = f"rank {rank} of {ranks}: {record.evidence.get('message', record.status)}"
    return record.model_copy(update={"evidence": {**record.evidence, "rank": rank, "message": message}})


def _without_record(rank: int, ranks: int, code: int | None, kernel_killed: bool) -> Record:
    """Make the record of a rank that left none, from the code that it ended with."""
    if code is None or code >= 0 or code == -signal.SIGTERM:
        message = f"rank {rank} of {ranks} left no result"
        return Record(status="error", evidence={"rank": rank, "exit_code": code, "message": message})
    name = signal.Signals(-code).name
    evidence = {"rank": rank, "signal": name, "message": f"rank {rank} of {ranks} ended by {name}"}
    if code != -signal.SIGKILL:
        return Record(status="crash", evidence=evidence)
    if kernel_killed:
        proof = "the kernel counted an out-of-memory kill in this control group"
        return Record(status="oom_host", evidence={**evidence, "proof": proof})
    return Record(status="killed_unknown", evidence=evidence)


def together(records: Sequence[Record]) -> Record:
    """Join the records of all ranks, in their order: the peaks of the largest, each step as long as the slowest's.

    Where the peak of one is not known there is no sum. Broken promises are those of all ranks.
    """
    first = min(records, key=lambda record: record.numerics is None)
    largest = max(records, key=lambda record: _peak(record.memory) or 0)
    flags = tuple(dict.fromkeys(flag for record in records for flag in record.flags))
    joined: dict[str, Any] = {"numerics": first.numerics, "flags": flags}
    peaks = [peak for record in records if (peak := _peak(record.memory)) is not None]
    if peaks:
        ranks = tuple(_rank(record.memory) for record in records)
        total = sum(peaks) if len(peaks) == len(records) else None
        joined["memory"] = largest.memory.model_copy(update={"ranks": ranks, "all_ranks_bytes": total})
    if largest.times.step_seconds:
        times = [record.times for record in records]
        slowest: dict[str, Any] = {
            name: tuple(max(turns) for turns in zip(*(getattr(each, name) for each in times), strict=True))
            for name in ("step_seconds", "fetch_seconds")
        }
        for name in ("native_peak_host_bytes", "first_step_seconds"):
            known = [value for each in times if (value := getattr(each, name)) is not None]
            slowest[name] = max(known, default=None)
        joined["times"] = largest.times.model_copy(update=slowest)
    if any("faults" in record.extra for record in records):
        joined["extra"] = {"faults": _faults(records)}
    return largest.model_copy(update=joined)


def _faults(records: Sequence[Record]) -> list[str]:
    """Return each broken promise once, with the rank where not all saw it."""
    of_ranks = [record.extra.get("faults", ()) for record in records]
    everywhere = [fault for fault in of_ranks[0] if all(fault in faults for faults in of_ranks)]
    ranks = len(records)
    return everywhere + [
        f"on rank {rank} of {ranks} {fault}"
        for rank, faults in enumerate(of_ranks)
        for fault in faults
        if fault not in everywhere
    ]


def _rank(memory: Memory) -> Rank:
    return Rank(peak_bytes=_peak(memory), peak_phase=memory.peak_phase, phases=memory.phases)


def shared(memory: Memory, ranks: int) -> Memory:
    """Divide the memory of one process among its ranks; its whole peak stands as that of all ranks."""
    if ranks == 1 or memory.peak_host_bytes is None:
        return memory
    peak, budget, slope = memory.peak_host_bytes // ranks, memory.budget_bytes, memory.slope_bytes_per_step
    return memory.model_copy(
        update={
            "all_ranks_bytes": memory.peak_host_bytes,
            "peak_host_bytes": peak,
            "phases": tuple(_share_of(phase, ranks) for phase in memory.phases),
            "resident_bytes": None if memory.resident_bytes is None else memory.resident_bytes // ranks,
            "slope_bytes_per_step": None if slope is None else slope / ranks,
            "within_budget": None if budget is None else peak <= budget,
        }
    )


def _share_of(phase: Phase, ranks: int) -> Phase:
    sizes = {name: size // ranks for name, size in phase.model_dump().items() if isinstance(size, int)}
    return phase.model_copy(update=sizes)


def of_devices(memory: Memory, peaks: Sequence[int], count: int) -> Memory:
    """Add the peaks of the first `count` devices to figures whose peak is that of the largest.

    `peaks` lacks devices whose allocator did not show one: then there is no sum, and whose the others are is not known.
    """
    if len(peaks) < count:
        return memory
    ranks = tuple(Rank(peak_bytes=peak) for peak in peaks[:count])
    return memory.model_copy(update={"ranks": ranks, "all_ranks_bytes": sum(peaks[:count])})


def _peak(memory: Memory) -> int | None:
    return memory.peak_device_bytes if memory.peak_device_bytes is not None else memory.peak_host_bytes
