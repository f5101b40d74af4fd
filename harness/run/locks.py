"""One harness at a time: in a folder of results, on a GPU, and where work comes from a cluster, on a machine."""

import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from harness import backends
from harness.contract.place import Place
from harness.machine import gpu
from harness.records.store import StoreError
from harness.run import temporary

PAUSE_SECONDS = 0.1
ANOTHERS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors by which a file that somebody else made is not opened for writing."""


class _Busy(StoreError):
    """A lock that another process has."""


@contextmanager
def measuring(folder: Path, places: Iterable[Place]) -> Iterator[None]:
    """Lock a folder of results, and the GPUs where a place is on one; raise StoreError at once where that fails.

    A lock ends with its process, however that ends; no child inherits it.
    """
    with _locked(_in(folder), f"another harness is writing to '{folder}'", "--results"), _on(gpus(places)):
        yield


@contextmanager
def in_turn(places: Iterable[Place], meanwhile: Callable[[], None]) -> Iterator[None]:
    """Lock this machine, and its GPUs where a place is on one, as soon as they are free.

    `meanwhile` is called several times a second, and what it raises ends the waiting. A file in the folder for
    temporary files stands for the machine: containers that do not share that folder are machines of their own.
    """
    with ExitStack() as locks:
        for lock in (_machine, partial(_on, gpus(places))):
            while True:
                meanwhile()
                try:
                    locks.enter_context(lock())
                    break
                except _Busy:
                    time.sleep(PAUSE_SECONDS)
        yield


def gpus(places: Iterable[Place]) -> list[str]:
    """Return the GPUs that cases of these places may use: all that are visible, since JAX takes memory on each."""
    on_gpu = any(place.device == "cuda" and backends.absent(*place) is None for place in places)
    return gpu.visible() if on_gpu else []


@contextmanager
def _on(names: Sequence[str]) -> Iterator[None]:
    """Lock GPUs by their names, all or none."""
    with ExitStack() as locks:
        for name in names:
            file = _temporary() / f"harness-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"
            reason = f"another harness measures on the GPU {name}, and two would spoil each other's figures"
            locks.enter_context(_locked(file, reason, "CUDA_VISIBLE_DEVICES"))
        yield


def _machine() -> AbstractContextManager[None]:
    return _locked(_temporary() / "harness-machine.lock", "another harness measures here", "TMPDIR")


def _temporary() -> Path:
    """Return the folder for temporary files; raise StoreError where none can be written."""
    with temporary.refusing():
        return Path(tempfile.gettempdir())


def _in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / ".lock"


@contextmanager
def _locked(file: Path, reason: str, option: str) -> Iterator[None]:
    """Lock a file for this process alone; where another has it, refuse with the reason and the option for another."""
    try:
        descriptor = _opened(file)
    except OSError as error:
        raise _unwritable(file.parent, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _Busy(f"{reason}: wait for it, or name another with {option}") from None
        except OSError as error:
            raise _unwritable(file.parent, error) from None
        yield
    finally:
        os.close(descriptor)


def _opened(file: Path) -> int:
    """Open a lock file, which may be another user's, or make it.

    It is opened for writing where that is allowed: a network's file system (NFS) locks no other.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(file, flags | os.O_RDWR)
    except FileNotFoundError:
        return os.open(file, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in ANOTHERS:
            raise
        return os.open(file, flags | os.O_RDONLY)


def _unwritable(folder: Path, error: OSError) -> StoreError:
    what, option = "results", "--results"
    with suppress(StoreError):  # where nothing can be written at all
        if folder == _temporary():
            what, option = "locks", "TMPDIR"
    return StoreError(f"{what} cannot be written to '{folder}' ({error.strerror}): name another folder with {option}")
