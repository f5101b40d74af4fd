"""Keep the keys and values of each layer in a file mapped into memory; pay page faults and what is written back.

Peak: no anonymous memory for kv; its pages count as resident while they are touched, backed by files, so that the
kernel can write them out and take them back. The files lie in `folder` and never have a name: they end with the
process, however it ends. A folder in memory (tmpfs) raises an error, since its files are the memory to be saved. All
disk space is reserved at once, since a full disk would otherwise kill the process at a later write.

A compiled JAX step reaches a file only by a call to the host, which copies a whole layer for every token: there the
keys and values of one layer are in memory beside the pages of the file.
"""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import BESIDE, Parts, Strategy, hookimpl
from strategies.cache.preallocated_cache import appending, within

ON_GPU = "keeps its files in the host's memory, where a GPU does not attend"
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def on_torch(parts: Parts, folder: str = "/var/tmp") -> Parts:
    import torch
    from torch._subclasses import FakeTensor

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape = parts.shape
        size = (2, batch, tokens, shape.key_heads, shape.head)

        def empty() -> Any:
            if isinstance(like, FakeTensor):  # a prediction counts the pages that will be resident, and makes no file
                return [like.new_empty(size) for _ in range(shape.layers)]
            refuse(folder, shape.layers * math.prod(size) * like.element_size())
            return [mapped(size, like) for _ in range(shape.layers)]

        return empty, appending(tokens)

    def mapped(size: tuple[int, ...], like: Any) -> Any:
        numbers = math.prod(size)
        descriptor = unnamed(folder, numbers * like.element_size())
        try:
            path = f"/proc/self/fd/{descriptor}"
            return torch.from_file(path, shared=True, size=numbers, dtype=like.dtype).view(size)
        finally:
            os.close(descriptor)

    return replace(parts, cache=cache)


def on_jax(parts: Parts, folder: str = "/var/tmp") -> Parts:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import io_callback

    stores: dict[tuple[int, ...], Any] = {}

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape, dtype = parts.shape, np.dtype(like.dtype)
        size = (shape.layers, 2, batch, tokens, shape.key_heads, shape.head)
        of_layer = jax.ShapeDtypeStruct(size[1:], dtype)
        parts.notes[BESIDE] = (math.prod(size) + math.prod(size[1:])) * dtype.itemsize

        def empty() -> Any:
            if not isinstance(like, jax.core.Tracer):  # a prediction makes no file
                refuse(folder, math.prod(size) * dtype.itemsize)
            return jnp.zeros((), jnp.int32)  # counts the writes, so that each waits for the one before

        def store() -> Any:
            """Map the file when it is first written to."""
            if size not in stores:
                stores[size] = mapped_array(folder, size, dtype)
            return stores[size]

        def written(count: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
            """Write new tokens on the host, and copy the layer."""
            end, layer = within(int(position) + k_BTGK.shape[1], tokens), int(layer)
            for old, new in zip(store()[layer], (k_BTGK, v_BTGK), strict=True):
                old[:, int(position) : end] = np.asarray(new)
            return np.int32(count + 1), store()[layer]

        def append(count: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
            end = position + k_BTGK.shape[1]
            known = isinstance(end, int)
            if known:
                within(end, tokens)
            results = jax.ShapeDtypeStruct((), jnp.int32), of_layer
            new = (x.astype(dtype) for x in (k_BTGK, v_BTGK))
            count, kv = io_callback(written, results, count, layer, position, *new)
            k, v = kv[:, :, :end] if known else kv
            return count, k, v, None

        return empty, append

    return replace(parts, cache=cache)


def mapped_array(folder: str, size: tuple[int, ...], dtype: Any) -> Any:
    """Map a file without a name as an array of numpy."""
    import mmap

    import numpy as np

    needed = math.prod(size) * dtype.itemsize
    descriptor = unnamed(folder, needed)
    try:
        return np.frombuffer(mmap.mmap(descriptor, needed), dtype).reshape(size)
    finally:
        os.close(descriptor)


def refuse(folder: str, needed: int) -> None:
    """Raise ValueError for a folder that is missing, is memory, or cannot hold so many bytes."""
    if not os.path.isdir(folder):
        raise ValueError(f"mapped_cache: there is no folder '{folder}': give one that is on a disk")
    if (kind := file_system(folder)) in IN_MEMORY:
        raise ValueError(f"mapped_cache: '{folder}' is {kind}, which is memory itself: give a folder on a disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"mapped_cache: no file can be made in '{folder}': give a folder that you may write to")
    status = os.statvfs(folder)
    if (free := status.f_bavail * status.f_frsize) < needed:
        raise ValueError(f"mapped_cache: '{folder}' has {free:,} bytes free of {needed:,}: free some or give another")


def file_system(folder: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the type of a folder's file system, or nothing where its device is not listed."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path(mounts).read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return ""


def unnamed(folder: str, size: int) -> int:
    """Open a file of this size that has no name; raise ValueError where the folder allows none."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    except OSError as error:
        raise ValueError(f"mapped_cache: no {size:,} bytes in '{folder}' ({error.strerror}): give another") from None


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "mapped_cache",
            rewrites=("cache",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            excludes={"torch/cuda": ON_GPU, "jax/cuda": ON_GPU},
        )
    ]
