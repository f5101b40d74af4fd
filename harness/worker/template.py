"""Import everything once, then fork a worker for each task: `python -m harness.worker.template SOCKET BACKEND PLUGINS`.

A fork copies the thread that calls it and no other, and no device survives it. So the template starts neither: it looks
at itself before each fork, and refuses where a plugin has started a thread, a process or a device. Workers become
children of the harness, as fresh ones are, for the process between them and the template ends at once.

Every message is a line of JSON. The template says `{"reason": null}` when it is ready, or why it forks nothing; it gets
a request with three descriptors, for output, errors, and a pipe in which one byte lets the worker begin.
"""

import ctypes
import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from harness.machine.environment import BLAS_THREADS
from harness.worker import forked

MESSAGE_BYTES = 1 << 16
BLAS_SETTERS = [
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "64")
]
LATE = {
    "torch": ("harness.backends.torch_memory", "torch.optim", "torch.utils.checkpoint", "torch._dynamo"),
    "jax": ("jax.experimental", "jax.scipy"),
}
"""Modules that a task would import on its way: the last of torch's takes the first checkpoint of a process a second."""


def main(descriptor: int, backend: str, names: Sequence[str]) -> int:
    """Answer requests until the harness closes its end."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    gc.disable()  # to search for garbage meanwhile would take a fourth of the time; workers search as ever
    loaded = _imported(backend, names)
    gc.collect()
    gc.freeze()
    gc.enable()
    ranges = forked.mapped_ranges()
    _tell(channel, reason=unsafe())
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            return 0
        request = json.loads(message)
        if _import_more(request["spec"], loaded):
            ranges = forked.mapped_ranges()
        reason = unsafe()
        pid = None if reason else _forked(channel, request, descriptors, loaded, ranges)
        for each in descriptors:
            os.close(each)
        _tell(channel, reason=reason, pid=pid)


def unsafe() -> str | None:
    """Return why a fork of this process would be no worker, None where it would."""
    from harness.machine import memory

    if len(os.listdir("/proc/self/task")) > 1:
        return "a thread was started by an import"
    if memory.children():
        return "a process was started by an import"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was started by an import"
    return None


def _imported(backend: str, names: Sequence[str]) -> Any:
    """Import the framework, what tasks do with it, and the plugins; return the plugins."""
    from harness import backends
    from harness.contract import plugins
    from harness.worker import tasks

    backends.load(backend)
    for module in (*dict.fromkeys(tasks.MODULES.values()), *LATE[backend]):
        import_module(module)
    return plugins.load(tuple(names))


def _import_more(spec: str, loaded: Any) -> bool:
    """Import what the workload of a task takes long to load, once for all its workers; return whether there was any.

    What cannot be imported is the worker's to report. To search for garbage meanwhile would take a fifth of the time,
    and in the workers a tenth of theirs.
    """
    task = json.loads(Path(spec).read_text(encoding="utf-8"))
    workload = loaded.workloads.get(task["cases"][0]["workload"])
    late = [each for each in (workload.imports if workload is not None else ()) if each not in sys.modules]
    if not late:
        return False
    gc.disable()
    for module in late:
        with suppress(Exception):
            import_module(module)
    gc.freeze()
    gc.enable()
    return any(module in sys.modules for module in late)


def _tell(channel: socket.socket, **message: Any) -> None:
    channel.send(json.dumps(message).encode())


def _forked(
    channel: socket.socket,
    request: dict[str, Any],
    descriptors: Sequence[int],
    loaded: Any,
    ranges: forked.Ranges,
) -> int:
    """Fork a worker by way of a process that ends at once; return its number."""
    end, hold = os.pipe()
    between = os.fork()
    if not between:
        worker = os.fork()
        if not worker:
            os.close(end)
            os.close(hold)
            _become(channel, request, descriptors, loaded, ranges)
        os.write(hold, str(worker).encode())
        os._exit(0)
    os.close(hold)
    os.waitpid(between, 0)
    with open(end, "rb") as pipe:
        return int(pipe.read())


def _become(
    channel: socket.socket,
    request: dict[str, Any],
    descriptors: Sequence[int],
    loaded: Any,
    ranges: forked.Ranges,
) -> NoReturn:
    """Be the worker of a request: a session, output and environment of its own; begin when the harness knows of it."""
    os.setsid()
    channel.close()
    out, err, go = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    begins = os.read(go, 1)
    for each in descriptors:
        os.close(each)
    if not begins:
        os._exit(1)
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    forked.complete(ranges)
    _set_blas_threads(int(os.environ.get(BLAS_THREADS, "1")))
    sys.argv = ["harness.worker", request["spec"], request["result"]]

    from harness.worker.process import leave, work

    leave(lambda: work(Path(request["spec"]), Path(request["result"]), loaded))


def _set_blas_threads(count: int) -> None:
    """Start the threads that an import under the worker's own environment would have started."""
    if count == 1:
        return
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    for path in {line.split(maxsplit=5)[5] for line in maps if "openblas" in line.rpartition("/")[2]}:
        with suppress(OSError):
            library = ctypes.CDLL(path)
            setter = next((getattr(library, name) for name in BLAS_SETTERS if hasattr(library, name)), None)
            if setter is not None:
                setter(count)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
