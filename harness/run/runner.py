"""Start a worker, watch it until it ends or waits for its turn, and name how it ended.

Every worker is forked from a template of its environment or, where that cannot be, a fresh interpreter; either way a
child of this process in a session of its own, its output in files, with a deadline and nothing of this process but the
task. Whatever it leaves behind is ended.
"""

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness import backends
from harness.machine import environment, memory, orphans
from harness.records import Memory, Record, Status, Task
from harness.records.store import parse
from harness.records.task import TURN_PIPE
from harness.run import template, temporary

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1
SOON_SECONDS = 0.001
GRACE_SECONDS = 5.0
LOG_LIMIT = 64 << 20
EXITED = "it ended with status {} and printed no error, as a plugin does that calls `sys.exit`"
RESULT_LIMIT = 1 << 20
TAIL_BYTES = 2000
NEAR_MEMORY = 0.9

Watch = Callable[[str], None]
Process = subprocess.Popen[bytes] | template.Forked
_running: set[int] = set()
"""Workers that are watched, by whatever thread: what is theirs is not left over."""


@dataclass
class _Watched:
    """What was seen of a worker from outside."""

    started: float
    peak: int = 0
    phase: str | None = None
    phase_peak: int = 0
    base: int = 0
    ended_by: str | None = None
    children_sum: int = 0
    children_peaks: dict[int, int] = field(default_factory=dict)
    children: frozenset[int] = frozenset()
    together: set[frozenset[int]] = field(default_factory=set)
    kernel_kills: int = field(default_factory=lambda: memory.kernel_kills())


def run(task: Task, threads: int, deadline: float, watch: Watch = lambda phase: None) -> list[Record]:
    """Run a task in a worker and return its records: one a case, whatever happened.

    `deadline` is in seconds for each case; `watch` is told the phase about ten times a second, and what it raises ends
    the worker. So does the end of the thread that called.
    """
    with worker(task, threads, deadline, watch) as one:
        one.attend()
        return one.records()


@contextmanager
def worker(task: Task, threads: int, deadline: float, watch: Watch = lambda phase: None) -> Iterator["Worker"]:
    """Start a worker, as `run` does; it has ended when this ends."""
    orphans.start()  # before orphans come here: it is to be nobody's child
    _adopt_orphans()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with ExitStack() as files:
        folder = files.enter_context(temporary.folder("harness-"))
        task = task.model_copy(update={"folder": str(folder), "parent": os.getpid()})
        ranks = max(case.ranks for case in task.cases)
        env = environment.variables(task.kind, task.case.place, task.run_id, threads, task.case.budget_bytes, ranks)
        env |= task.environment
        env["TMPDIR"] = str(folder)  # what a killed worker leaves goes with its folder
        with temporary.refusing():
            (folder / "task.json").write_text(task.model_dump_json(), encoding="utf-8")
            pipe = _turn_pipe(folder, files) if task.turns > 1 else None
        key = template.ready(task, env, deadline, watch)
        one = Worker(task, folder, pipe, deadline, watch, before, _started(key, env, folder))
        try:
            yield one
        finally:
            one.end()


def _turn_pipe(folder: Path, files: ExitStack) -> int:
    """Make the pipe by which a worker says that it waits, and open it."""
    os.mkfifo(folder / TURN_PIPE)
    pipe = os.open(folder / TURN_PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    files.callback(os.close, pipe)
    return pipe


class Worker:
    """A process that runs a task, as it is seen from outside; `waits` while it is stopped for the turns of others."""

    def __init__(
        self,
        task: Task,
        folder: Path,
        pipe: int | None,
        deadline: float,
        watch: Watch,
        before: set[int],
        process: Process,
    ) -> None:
        self.task, self.folder, self.pipe, self.deadline, self.watch = task, folder, pipe, deadline, watch
        self.process, self.before = process, before
        self.seen = _Watched(time.monotonic())
        self.begun, self.written, self.stopped = self.seen.started, 0, 0.0
        self.waits = self.ended = False

    def attend(self) -> None:
        """Watch it until it ends, has to be ended, or waits for its turn."""
        seen, stopping = self.seen, False
        self.watch(seen.phase or "starting")
        while self.process.poll() is None:
            if stopping and _is_stopped(self.process.pid):
                self.waits, self.stopped = True, time.monotonic()
                return
            template.rest(self.process.pid, SOON_SECONDS if stopping else POLL_SECONDS, self.pipe)
            stopping = stopping or self._is_stopping()
            if time.monotonic() - self.begun > self.deadline:
                seen.ended_by = "deadline"
                return
            if stopping:
                continue
            if (size := _size(self.folder / "result.jsonl")) > self.written:  # another case has ended
                self.begun, self.written = time.monotonic(), size
            with suppress(OSError, ValueError, IndexError):
                seen.peak = max(seen.peak, memory.read(self.process.pid).peak)
            _read_phase(self.folder, seen)
            _read_children(self.process.pid, seen)
            self.watch(seen.phase or "starting")
            if any(_size(self.folder / log) > LOG_LIMIT for log in ("stdout", "stderr")):
                seen.ended_by = "log"
                return
        _read_phase(self.folder, seen)

    def go_on(self) -> None:
        """Give it its turn, and watch it until it ends or waits for the next one; what it rested counts nowhere."""
        self.waits = False
        rested = time.monotonic() - self.stopped
        self.begun += rested
        self.seen.started += rested
        _signal(self.process.pid, signal.SIGCONT)
        self.attend()

    def _is_stopping(self) -> bool:
        """Check whether it is about to stop, which it says through the pipe."""
        try:
            return self.pipe is not None and bool(os.read(self.pipe, 1))
        except BlockingIOError:
            return False

    def end(self) -> None:
        """End it, with what it left behind."""
        if not self.ended:
            self.ended = True
            _end(self.process, self.before)

    def records(self) -> list[Record]:
        """End it and return its records: one a case."""
        self.end()
        start = "forked" if isinstance(self.process, template.Forked) else "fresh"
        return [
            record.model_copy(update={"origin": record.origin.model_copy(update={"start": start})})
            for record in _records(self.task, self.process.returncode or 0, self.folder, self.seen)
        ]


def _is_stopped(pid: int) -> bool:
    """Check whether a child is stopped, and leave what it ended with to others."""
    with suppress(ChildProcessError):
        state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return state is not None and state.si_code == os.CLD_STOPPED
    return False


def _started(key: template.Key | str, env: dict[str, str], folder: Path) -> Process:
    """Start a worker from the template with this key, and as a fresh interpreter where there is none."""
    spec, result = folder / "task.json", folder / "result.jsonl"
    with ExitStack() as files:
        with temporary.refusing():
            out, err = (files.enter_context(open(folder / name, "wb")) for name in ("stdout", "stderr"))
        files.enter_context(template.starting)
        process: Process | str = key if isinstance(key, str) else template.fork(key, env, spec, result, out, err)
        if isinstance(process, str):
            command = [sys.executable, "-m", "harness.worker", str(spec), str(result)]
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        _running.add(process.pid)
        return process


def _read_phase(folder: Path, seen: _Watched) -> None:
    with suppress(OSError, ValueError, KeyError, TypeError):  # a worker may write anything there
        line = json.loads((folder / "phase.json").read_bytes())
        if line["base"] != seen.base:
            seen.peak = 0  # polls before the base saw imports, priming and compiling
        seen.phase, seen.phase_peak, seen.base = line["phase"], int(line["peak_bytes"]), int(line["base"])


def _read_children(worker: int, seen: _Watched) -> None:
    """Note what the children take now, the peak of each, and which may have been there at once.

    Two that are seen by the same poll or by neighbouring ones may have been; compilers that follow each other were not.
    A child shares the worker's memory until it executes a program: one that has not is read from its second poll on.
    """
    total, alive = 0, set()
    for child in memory.descendants(worker):
        with suppress(OSError, ValueError):
            if child in seen.children or not memory.same_program(child, worker):
                size, peak = memory.proportional(child), memory.read(child).peak
                total += min(size, peak)
                seen.children_peaks[child] = max(seen.children_peaks.get(child, 0), peak)
            seen.children_peaks.setdefault(child, 0)
            alive.add(child)
    seen.children_sum = max(seen.children_sum, total)
    seen.together.add(seen.children | alive)
    seen.children = frozenset(alive)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _end(process: Process, before: set[int]) -> None:
    """End the worker's group, then every process that came to this one since: orphans are re-parented to it."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        _signal(process.pid, signal.SIGCONT)  # it may wait for its turn
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    _signal(process.pid, signal.SIGKILL)
    with template.starting:  # not before: another thread would take it for left over, and cut its grace short
        _running.discard(process.pid)
    process.wait()
    until = time.monotonic() + GRACE_SECONDS
    while (left := _left_over(before)) and time.monotonic() < until:
        for child in left:
            with suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(left, timeout=0.5)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _left_over(before: set[int]) -> list[psutil.Process]:
    with template.starting:
        children = psutil.Process().children(recursive=True)
        own = _running | template.processes()
        others = {pid for process in own for pid in (process, *memory.descendants(process))}
    return [child for child in children if child.pid not in before | others]


def _adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent died, so that they can be found."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _records(task: Task, code: int, folder: Path, seen: _Watched) -> list[Record]:
    """Take the records a worker left, as far as they can be believed, and name what it did not do."""
    records, fault = _believed(folder / "result.jsonl", len(task.cases))
    # ranks that are processes tell of themselves
    alone = backends.processes(task.case.place.backend, task.case.ranks) == 1
    if seen.children_peaks and alone:
        most = max(sum(seen.children_peaks[child] for child in group) for group in seen.together)
        peaks = {"child_peak_bytes": seen.children_sum, "child_peak_bound_bytes": most}
        records = [_with_children(record, peaks) for record in records]
    if seen.ended_by is None and code == 0 and fault is None and len(records) == len(task.cases):
        return records
    records = records[: len(task.cases) - 1]  # a worker that ended badly is not believed about its last case
    failure = _failure(code, folder, seen, fault or "the worker left no result")
    return [*records, *(failure.model_copy(update={"case": case}) for case in task.cases[len(records) :])]


def _with_children(record: Record, peaks: dict[str, int]) -> Record:
    flags = tuple(dict.fromkeys((*record.flags, "child_processes")))
    return record.model_copy(update={**peaks, "flags": flags})


def _believed(path: Path, cases: int) -> tuple[list[Record], str | None]:
    records: list[Record] = []
    try:
        text = _read_regular(path, RESULT_LIMIT * cases)
        for line in text.splitlines():
            records.append(parse(line))
    except OSError:
        return [], "the worker left no result"
    except ValueError as error:
        return records[:cases], str(error)
    return records[:cases], None if len(records) <= cases else "the worker left more results than cases"


def _read_regular(path: Path, limit: int) -> bytes:
    """Read a file that an untrusted process left: never a pipe, a device or a link, never more than the limit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("the result is not a file")
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"the result is larger than {limit} bytes")
    return text


def _failure(code: int, folder: Path, seen: _Watched, fault: str) -> Record:
    tail = _tail(folder / "stderr")
    status: Status
    evidence: dict[str, Any] = {"phase": seen.phase, "seconds": round(time.monotonic() - seen.started, 3)}
    if tail:
        evidence["stderr_tail"] = tail
    if seen.ended_by == "deadline":
        status = "timeout"
        evidence["signal"] = _name(-code) if code < 0 else None
        evidence["message"] = f"not finished after {evidence['seconds']:.0f} s"
    elif seen.ended_by == "log":
        status, evidence["message"] = "invalid_output", f"it printed more than {LOG_LIMIT >> 20} MiB"
    elif code < 0:
        status = _killed(-code, tail, seen, evidence)
    elif code > 0:
        status = "error"
        evidence |= {
            "exit_code": code,
            "message": tail.strip().splitlines()[-1] if tail.strip() else EXITED.format(code),
        }
    else:
        status, evidence["message"] = "invalid_output", fault
    if not seen.base:
        return Record(status=status, evidence=evidence)
    memory = Memory(peak_host_bytes=max(seen.peak - seen.base, seen.phase_peak), peak_phase=seen.phase)
    return Record(status=status, evidence=evidence, flags=("lower_bound",), memory=memory)


def _name(number: int) -> str:
    """Return the name of a signal; most of those for real time have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _killed(number: int, tail: str, seen: _Watched, evidence: dict[str, Any]) -> Status:
    name = _name(number)
    evidence |= {"signal": name, "message": f"ended by {name}"}
    if number == signal.SIGABRT and "bad_alloc" in tail:
        return "oom_host"
    if number != signal.SIGKILL:
        return "crash"
    if memory.kernel_kills() > seen.kernel_kills:
        evidence["proof"] = "the kernel counted an out-of-memory kill in this control group"
        return "oom_host"
    if seen.peak >= NEAR_MEMORY * psutil.virtual_memory().total:
        evidence["proof"] = "weak: its last known peak was at least 0.9 of the machine's memory"
        return "oom_host"
    return "killed_unknown"


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, _size(path) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
