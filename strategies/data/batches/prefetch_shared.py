"""Gather batches in worker processes that share the source, through fixed slots; pay one copy out of each slot.

Peak: the source once, for all workers together, `workers` x `depth` slots of a batch, and the batch in use. The rows
are read into the shared memory; what lies elsewhere is copied to it, and is there twice: ignored targets, and rows that
another strategy has made, as `int8_rows` does, which a prediction counts once. That memory has no name (memfd): the
kernel frees it with the last process that has it open, even when all are killed, and nothing must be unlinked. A worker
is a fresh interpreter that loads numpy and nothing else, ends with its input, and cuts plain windows itself: windows of
other values raise an error. Grain shares its batches in a similar way.
"""

import mmap
import os
import pickle
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl
from strategies.data.batches.prefetch_process import assert_plain, explained, in_turn, process
from strategies.data.batches.torch_dataloader import in_order

Batches = Iterator[tuple[Any, Any]]
Lent = dict[int, tuple[int, int]]
"""Open descriptors of shared memory, with the address and the bytes of each in this process."""
PIECE = 1 << 20
"""About the bytes that are copied at once."""


def serve() -> None:
    """Gather the windows that are asked for into shared slots, until the input ends.

    This is the whole program of a worker, which receives it as text: it can refer to nothing else of this module. The
    first line of its input holds the locations of the arrays and the sizes of the windows.
    """
    import json
    import mmap
    import os
    import pickle
    import signal
    import struct
    import sys

    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sizes = json.loads(requests.readline())

    def shared(descriptor, offset, dtype, shape, strides):
        return np.ndarray(shape, dtype, mmap.mmap(descriptor, os.fstat(descriptor).st_size), offset, strides)

    inputs, targets, x_MBW, y_MBW, indices_MB = (shared(*array) for array in sizes["arrays"])
    windows = [
        np.lib.stride_tricks.as_strided(
            rows,
            (sizes["count"], sizes["window"], *rows.shape[1:]),
            (sizes["stride"] * rows.strides[0], *rows.strides),
            writeable=False,
        )
        for rows in (inputs, targets)
    ]
    while len(request := requests.read(8)) == 8:
        (slot,) = struct.unpack("q", request)
        text = b""
        try:
            indices_B = indices_MB[slot]
            if indices_B.min() < 0 or indices_B.max() >= sizes["count"]:
                raise IndexError(f"the order gave a window that is not among the {sizes['count']} of the source")
            for view, slots in zip(windows, (x_MBW, y_MBW), strict=True):
                step = max(1, sizes["piece"] * len(indices_B) // slots[slot].nbytes)
                for start in range(0, len(indices_B), step):
                    slots[slot, start : start + step] = view[indices_B[start : start + step]]
        except Exception as error:
            text = pickle.dumps(error)
        answers.write(struct.pack("q", len(text)) + text)
        answers.flush()


def on_any(parts: Parts, workers: int = 2, depth: int = 2) -> Parts:
    if workers < 1 or depth < 1:
        raise ValueError(f"prefetch_shared: workers and depth must be at least 1, not {workers} and {depth}")
    inner = parts.batches
    lent: Lent = {}

    def rows(parts: Parts, path: Path) -> Any:
        import numpy as np

        mapped: Any = np.load(path, mmap_mode="r")  # reads the header alone
        shared = room(mapped.shape, mapped.dtype, lent)
        if not mapped.flags.c_contiguous:
            shared[...] = mapped
            return shared
        with path.open("rb") as file:
            file.seek(mapped.offset)
            file.readinto(shared.reshape(-1).view(np.uint8))
        return shared

    def batches(parts: Parts, windows: Windows) -> Batches:
        assert_plain("prefetch_shared", windows)
        return gathered(parts, windows, in_order(parts, inner, windows.source), lent, workers, depth)

    return replace(parts, rows=rows, batches=batches)


def room(shape: Any, dtype: Any, lent: Lent) -> Any:
    """Allocate an array in memory that other processes can map, as long as the array lives."""
    import numpy as np

    size = max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    descriptor = os.memfd_create("rows", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    array: Any = np.ndarray(shape, dtype, memory)
    lent[descriptor] = (array.__array_interface__["data"][0], size)

    def close() -> None:
        lent.pop(descriptor)
        os.close(descriptor)

    weakref.finalize(memory, close)
    return array


def borrowed(rows: Any, lent: Lent) -> Any:
    """Return the rows themselves where they lie in shared memory, else a copy there."""
    import numpy as np

    if isinstance(rows, np.ndarray) and location(rows, lent):
        return rows
    copy = room(rows.shape, rows.dtype, lent)
    step = max(1, PIECE * len(rows) // copy.nbytes)
    for start in range(0, len(rows), step):
        copy[start : start + step] = rows[start : start + step]
    return copy


def location(array: Any, lent: Lent) -> tuple[Any, ...] | None:
    """Return descriptor, offset, dtype, shape and strides of an array; None where its memory is not shared."""
    at = array.__array_interface__["data"][0]
    for descriptor, (address, size) in lent.items():
        if address <= at < address + size:
            return descriptor, at - address, array.dtype.str, array.shape, array.strides
    return None


def gathered(parts: Parts, windows: Windows, orders: Iterator[Any], lent: Lent, workers: int, depth: int) -> Batches:
    """Yield the batches that the workers gather in turn, `depth` batches ahead each."""
    import json

    import numpy as np

    source, slots = windows.source, workers * depth
    rows = [borrowed(array, lent) for array in (source.inputs, source.targets)]
    x_MBW, y_MBW = (room((slots, source.batch, source.window, *array.shape[1:]), array.dtype, lent) for array in rows)
    indices_MB = room((slots, source.batch), np.int64, lent)
    sizes: dict[str, Any] = {
        "arrays": [location(array, lent) for array in (*rows, x_MBW, y_MBW, indices_MB)],
        "count": source.count,
        "window": source.window,
        "stride": source.stride,
        "piece": PIECE,
    }

    def ask(lane: tuple[int, Any], indices_B: Any) -> None:
        slot, worker = lane
        indices_MB[slot] = indices_B
        with explained("prefetch_shared", worker):
            worker.stdin.write(slot.to_bytes(8, sys.byteorder))
            worker.stdin.flush()

    def copied(lane: tuple[int, Any]) -> tuple[Any, Any]:
        slot, worker = lane
        answer(worker)
        return x_MBW[slot].copy(), y_MBW[slot].copy()  # the slot is filled again at once

    with ExitStack() as stack:
        descriptors = [descriptor for descriptor, *_ in sizes["arrays"]]
        started = [stack.enter_context(process(serve, descriptors)) for _ in range(workers)]
        for worker in started:
            with explained("prefetch_shared", worker):
                worker.stdin.write(json.dumps(sizes).encode() + b"\n")
        yield from in_turn(parts, list(enumerate(started * depth)), orders, ask, copied)


def answer(worker: Any) -> None:
    """Wait until a slot is filled, or raise the error of the worker."""
    with explained("prefetch_shared", worker):
        head = worker.stdout.read(8)
        if len(head) < 8:
            raise EOFError
    if size := int.from_bytes(head, sys.byteorder):
        raise pickle.loads(worker.stdout.read(size))


def holds(extent: Extent, workers: int = 2, depth: int = 2) -> Holding:
    """Count the slots, and the copy of what lies in no file: targets of tokens that are no view of the inputs."""
    copied = extent.rows * extent.target_bytes if extent.values else 0
    return Holding(batches=copied + workers * depth * (extent.batch_bytes + 8 * extent.batch))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("prefetch_shared", rewrites=("rows", "batches"), on=on, about=__doc__, holds=holds)]
