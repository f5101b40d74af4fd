"""One harness at a time: in a folder of results, and on a GPU."""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness import environment
from harness.records import StoreError
from harness.types import Place


@contextmanager
def measuring(folder: Path, places: Iterable[str]) -> Iterator[None]:
    """Hold a folder of results, and the GPU where a place is on one, or raise StoreError at once.

    A lock goes with its process, however that ends; no child inherits it.
    """
    with ExitStack() as held:
        held.enter_context(_held(_in(folder), f"another harness is writing to '{folder}'", "--results"))
        if any(Place.parse(place).device == "cuda" for place in places) and environment.gpu_bytes() is not None:
            number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            file = Path(tempfile.gettempdir()) / f"harness-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', number)}.lock"
            told = f"another harness measures on the GPU {number}, and two would spoil each other's figures"
            held.enter_context(_held(file, told, "CUDA_VISIBLE_DEVICES"))
        yield


def _in(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / ".lock"


@contextmanager
def _held(file: Path, taken: str, other: str) -> Iterator[None]:
    """Hold a lock file for this process alone; `taken` says who has it, `other` what names another one."""
    try:
        descriptor = _opened(file)
    except OSError as error:
        raise _unwritable(file.parent, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{taken}: wait for it, or name another with {other}") from None
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
    return StoreError(f"results cannot be written to '{folder}' ({error.strerror}): name another folder with --results")
