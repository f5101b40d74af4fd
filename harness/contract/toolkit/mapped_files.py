"""Files without a name that are mapped into memory: the kernel writes their pages out, and takes them back.

They end with the process, however it ends. All disk space is reserved at once, since a full disk would kill the process
at a later write. Each function raises ValueError with one sentence that begins with the name of the strategy.
"""

import math
import os
from pathlib import Path
from typing import Any

FOLDER = "/var/tmp"  # where temporary files belong that a disk is to hold
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def check(strategy: str, folder: str, needed: int = 0) -> None:
    """Refuse a folder that is missing, is memory itself, or cannot hold so many bytes."""
    if not os.path.isdir(folder):
        raise ValueError(f"{strategy}: there is no folder '{folder}': give one that is on a disk")
    if (kind := file_system(folder)) in IN_MEMORY:
        raise ValueError(f"{strategy}: '{folder}' is {kind}, which is memory itself: give a folder on a disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{strategy}: no file can be made in '{folder}': give a folder that you may write to")
    status = os.statvfs(folder)
    if (free := status.f_bavail * status.f_frsize) < needed:
        raise ValueError(f"{strategy}: '{folder}' has {free:,} bytes free of {needed:,}: free some or give another")


def file_system(folder: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the type of a folder's file system, or nothing where its device is not listed."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path(mounts).read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return ""


def unnamed(strategy: str, folder: str, size: int) -> int:
    """Open a file of so many bytes that has no name, and return its descriptor, which the caller closes."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    except OSError as error:
        raise ValueError(f"{strategy}: no {size:,} bytes in '{folder}' ({error.strerror}): give another") from None


def in_torch(strategy: str, folder: str, size: tuple[int, ...], dtype: Any) -> Any:
    """Map a file of zeros as a tensor [*size] on the CPU; under a fake mode, make a fake one and no file."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    numbers = math.prod(size)
    if not numbers or any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        return torch.zeros(size, dtype=dtype, device="cpu")
    descriptor = unnamed(strategy, folder, numbers * dtype.itemsize)
    try:
        path = f"/proc/self/fd/{descriptor}"
        return torch.from_file(path, shared=True, size=numbers, dtype=dtype).view(size)
    finally:
        os.close(descriptor)


def in_numpy(strategy: str, folder: str, size: tuple[int, ...], dtype: Any) -> Any:
    """Map a file of zeros as an array [*size]."""
    import mmap

    import numpy as np

    needed = math.prod(size) * dtype.itemsize
    descriptor = unnamed(strategy, folder, needed)
    try:
        return np.frombuffer(mmap.mmap(descriptor, needed), dtype).reshape(size)
    finally:
        os.close(descriptor)
