"""One harness at a time: in a folder of results, on a GPU, and where work comes from a cluster, on a machine."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from harness.contract.place import Place
from harness.machine import gpu
from harness.records.store import StoreError

PAUSE_SECONDS = 0.1


class _Busy(StoreError):
    """A lock that another process has."""


@contextmanager
def measuring(folder: Path, places: Iterable[Place]) -> Iterator[None]:
    """Lock a folder of results, and the GPU where a place is on one; raise StoreError at once where that fails.

    A lock ends with its process, however that ends; no child inherits it.
    """
    with _locked(_in(folder), f"another harness is writing to '{folder}'", "--results"), _gpu(places):
        yield


@contextmanager
def in_turn(places: Iterable[Place], meanwhile: Callable[[], None]) -> Iterator[None]:
    """Lock this machine, and its GPU where a place is on one, as soon as they are free.

    `meanwhile` is called several times a second, and what it raises ends the waiting. A file in the folder for
    temporary files stands for the machine: containers that do not share that folder are machines of their own.
    """
    with ExitStack() as locks:
        for lock in (_machine, partial(_gpu, tuple(places))):
            while True:
                meanwhile()
                try:
                    locks.enter_context(lock())
                    break
                except _Busy:
                    time.sleep(PAUSE_SECONDS)
        yield


@contextmanager
def _gpu(places: Iterable[Place]) -> Iterator[None]:
    if not any(place.device == "cuda" for place in places) or gpu.usable_bytes() is None:
        yield
        return
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    file = Path(tempfile.gettempdir()) / f"harness-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', number)}.lock"
    reason = f"another harness measures on the GPU {number}, and two would spoil each other's figures"
    with _locked(file, reason, "CUDA_VISIBLE_DEVICES"):
        yield


def _machine() -> AbstractContextManager[None]:
    return _locked(Path(tempfile.gettempdir()) / "harness-machine.lock", "another harness measures here", "TMPDIR")


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
    """Open a lock file, which may be another user's, or make it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(file, flags)
    except FileNotFoundError:
        return os.open(file, flags | os.O_CREAT, 0o644)


def _unwritable(folder: Path, error: OSError) -> StoreError:
    here = folder == Path(tempfile.gettempdir())
    what, option = ("locks", "TMPDIR") if here else ("results", "--results")
    return StoreError(f"{what} cannot be written to '{folder}' ({error.strerror}): name another folder with {option}")
