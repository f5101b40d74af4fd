"""Keep a template process for each environment of workers, from which they are forked in a hundredth of a second.

Templates live within `kept`, at most a handful, and end with it; a worker is a fresh interpreter wherever there is none
or it refuses. What is measured is the same both ways; see `harness.worker.template` for how a fork is made safe.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from harness.machine import memory
from harness.machine.environment import BLAS_THREADS
from harness.records import Task

KEPT = 4
"""Templates alive at once, the latest used; each holds about 250 MiB, of which most is shared with its workers."""
ATTEMPTS = 2
READY_SECONDS, ANSWER_SECONDS = 60.0, 30.0
POLL_SECONDS = 0.1
MESSAGE_BYTES = 1 << 16
OWN = frozenset({"TMPDIR"})
"""Variables that each worker has of its own."""

WITHOUT_DEVICE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""By this torch asks the driver's library whether there is a GPU, and does not start CUDA, which no fork survives."""

Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]
"""What decides what a template has imported: the backend, the plugins, and the environment."""

starting = threading.Lock()
"""Holding while a process is started and written down: before that, nobody could know it from what was left over."""


@dataclass(frozen=True)
class Template:
    """A process that imported everything and waits to be forked, and the socket that it listens on."""

    process: "subprocess.Popen[bytes]"
    channel: socket.socket
    reason: str | None = None

    def end(self) -> None:
        """Kill it with what its imports have started."""
        left = memory.descendants(self.process.pid) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pid in left:
            with suppress(psutil.Error):
                psutil.Process(pid).kill()
        self.channel.close()


@dataclass
class Forked:
    """A worker that was forked: a child of this process like one that `Popen` started."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it ended; None while it runs, and 0 where somebody else has waited for it, as `Popen` does."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended; raise TimeoutExpired where it still runs after so many seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = POLL_SECONDS if until is None else until - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            rest(self.pid, left)
        return code


def rest(pid: int, seconds: float, pipe: int | None = None) -> None:
    """Wait until a child ends, a pipe has something, or so many seconds.

    Where the kernel cannot say when a child ends, it is a hundredth of a second at most.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        time.sleep(min(seconds, 0.01))
        return
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        if pipe is not None:
            ended.register(pipe, select.POLLIN)
        ended.poll(seconds * 1e3)
    finally:
        os.close(descriptor)


class _Pool:
    """The templates of this process, the latest used last, and the failures of those that are gone."""

    def __init__(self) -> None:
        self.depth = 0
        self.lock = threading.Lock()
        self.making: dict[Key, threading.Lock] = {}
        self.templates: dict[Key, Template] = {}
        self.failures: Counter[Key] = Counter()
        self.reasons: dict[Key, str] = {}
        self.pids: set[int] = set()


_pool = _Pool()


@contextmanager
def forking() -> Iterator[None]:
    """Let workers be forked in this block; in the end no template is left."""
    with _pool.lock:
        _pool.depth += 1
    try:
        yield
    finally:
        with _pool.lock:
            _pool.depth -= 1
            last = _pool.depth == 0
        if last:
            for key in list(_pool.templates):
                _drop(key)
            _pool.failures.clear()
            _pool.reasons.clear()


@contextmanager
def suspended() -> Iterator[None]:
    """Let workers be fresh interpreters in this block; the templates wait."""
    depth, _pool.depth = _pool.depth, 0
    try:
        yield
    finally:
        _pool.depth = depth


def processes() -> set[int]:
    """Return the numbers of all templates; called with `starting` held."""
    return set(_pool.pids)


def ready(task: Task, env: Mapping[str, str], seconds: float, watch: Callable[[str], None]) -> Key | str:
    """Make sure of a template for a task and return its key; where there is to be none, the reason in words.

    `watch` is called while the template imports; what it raises ends it.
    """
    if not _pool.depth:
        return "templates are not kept"
    same = tuple(sorted((name, value) for name, value in env.items() if name not in OWN))
    key = (task.case.place.backend, task.plugins, same)
    with _pool.lock:
        making = _pool.making.setdefault(key, threading.Lock())
    while not making.acquire(timeout=POLL_SECONDS):
        watch("starting")
    try:
        return _made(key, min(seconds, READY_SECONDS), watch)
    finally:
        making.release()


def _made(key: Key, seconds: float, watch: Callable[[str], None]) -> Key | str:
    with _pool.lock:
        if key in _pool.reasons:
            return _pool.reasons[key]
        template = _pool.templates.pop(key, None)
        if template is not None:
            _pool.templates[key] = template  # the latest used is the last
    if template is not None and template.process.poll() is None:
        return key
    if template is not None:
        _fail(key, "its template was ended")
    if _pool.failures[key] >= ATTEMPTS:
        return "its template fails"
    while len(_pool.templates) >= KEPT:
        _drop(next(iter(_pool.templates)))
    template = _started(key)
    try:
        reason = _first_words(template, seconds, watch)
    except BaseException:
        _forget(template)
        raise
    if reason is not None:
        _forget(template)
        _pool.reasons[key] = reason
        return reason
    with _pool.lock:
        _pool.templates[key] = template
    return key


def _started(key: Key) -> Template:
    backend, names, environment = key
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there, starting:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.worker.template", str(there.fileno()), backend, *names],
            env={**dict(environment), BLAS_THREADS: "1", **WITHOUT_DEVICE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
            start_new_session=True,
        )
        _pool.pids.add(process.pid)
    return Template(process, here)


def _first_words(template: Template, seconds: float, watch: Callable[[str], None]) -> str | None:
    """Wait until a template is ready; return why it forks nothing, None where it does."""
    until = time.monotonic() + seconds
    template.channel.settimeout(POLL_SECONDS)
    while time.monotonic() < until:
        watch("starting")
        try:
            message = template.channel.recv(MESSAGE_BYTES)
        except TimeoutError:
            continue
        except OSError:
            message = b""
        if not message:
            return "its template ended while it imported"
        template.channel.settimeout(ANSWER_SECONDS)
        reason: str | None = json.loads(message)["reason"]
        return reason
    return f"its template had not imported everything after {seconds:.0f} s"


def fork(key: Key, env: Mapping[str, str], spec: Path, result: Path, out: IO[bytes], err: IO[bytes]) -> Forked | str:
    """Fork a worker from a template that is ready, or return why not; called with `starting` held.

    It begins when this process knows its number, so that none runs of which nobody knows.
    """
    template = _pool.templates.get(key)
    if template is None:
        return "its template was ended"
    own = {name: env[name] for name in (*OWN, BLAS_THREADS) if name in env}
    request = json.dumps({"spec": str(spec), "result": str(result), "environment": own}).encode()
    go, begin = os.pipe()
    try:
        socket.send_fds(template.channel, [request], [out.fileno(), err.fileno(), go])
        answer = json.loads(template.channel.recv(MESSAGE_BYTES))
        if answer["pid"] is None:
            reason = str(answer["reason"])
            _pool.reasons[key] = reason
            return reason
        os.write(begin, b"1")
        return Forked(answer["pid"])
    except (OSError, ValueError, KeyError):
        return _fail(key, "its template was ended")
    finally:
        os.close(go)
        os.close(begin)


def _fail(key: Key, reason: str) -> str:
    _pool.failures[key] += 1
    _drop(key)
    return reason


def _drop(key: Key) -> None:
    with _pool.lock:
        template = _pool.templates.pop(key, None)
    if template is not None:
        _forget(template)


def _forget(template: Template) -> None:
    template.end()
    _pool.pids.discard(template.process.pid)
