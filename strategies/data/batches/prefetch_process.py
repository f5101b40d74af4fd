"""Gather batches in worker processes, in turn; pay a copy of the source in each, and each batch through a pipe.

Peak: `workers` copies of the source, inputs and targets apart, and `workers` x `depth` batches in the workers, beside
the source and the batch in use; what an interpreter with numpy takes, once for each worker, is measured and not
predicted. Worker processes that are spawned and not forked cost as much (torch's DataLoader on other systems than
Linux). Forking would share the source, but it copies locks that other threads hold, and both frameworks run threads:
JAX warns of the deadlock, and OpenMP runs into it. So each worker is a fresh interpreter that loads numpy and nothing
else, and cuts plain windows itself: windows of other values raise an error. `multiprocessing` is not used: its workers
would import the program that started this one.
"""

import inspect
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl
from strategies.data.batches.torch_dataloader import in_order, refuse_other_windows

Batches = Iterator[tuple[Any, Any]]
PIECE = 1 << 20
"""About the bytes of the source that are sent at once."""
LOOKED_AT = 256
"""The most windows that are compared with the rows they should be."""


def serve() -> None:
    """Receive rows, then gather the windows that are asked for, until the input ends.

    This is the whole program of a worker, which receives it as text: it can refer to nothing else of this module. A
    thread writes the answers, so that one batch is gathered while another one waits in the pipe.
    """
    import json
    import pickle
    import signal
    import struct
    import sys
    from queue import SimpleQueue
    from threading import Thread

    import numpy as np

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    requests: Any = sys.stdin.buffer
    answers = sys.stdout.buffer
    sizes = json.loads(requests.readline())
    rows = [np.empty(shape, dtype) for dtype, shape in sizes["rows"]]
    for array in rows:
        requests.readinto(array.reshape(-1).view(np.uint8))
    views = [
        np.lib.stride_tricks.as_strided(
            array,
            (sizes["count"], sizes["window"], *array.shape[1:]),
            (sizes["stride"] * array.strides[0], *array.strides),
            writeable=False,
        )
        for array in rows
    ]
    ready: SimpleQueue = SimpleQueue()

    def write() -> None:
        for answer in iter(ready.get, None):
            for part in answer:
                answers.write(part)
            answers.flush()
            del answer, part

    thread = Thread(target=write, daemon=True)
    thread.start()
    indices_B = np.empty(sizes["batch"], np.int64)
    while requests.readinto(indices_B.view(np.uint8)) == indices_B.nbytes:
        try:
            if indices_B.min() < 0 or indices_B.max() >= sizes["count"]:
                raise IndexError(f"the order gave a window that is not among the {sizes['count']} of the source")
            ready.put([struct.pack("q", 0), *(np.ascontiguousarray(view[indices_B]).data.cast("B") for view in views)])
        except Exception as error:
            text = pickle.dumps(error)
            ready.put([struct.pack("q", len(text)), text])
    ready.put(None)
    thread.join()


def on_any(parts: Parts, workers: int = 2, depth: int = 2) -> Parts:
    if workers < 1 or depth < 1:
        raise ValueError(f"prefetch_process: workers and depth must be at least 1, not {workers} and {depth}")
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Batches:
        assert_plain("prefetch_process", windows)
        return gathered(parts, windows, in_order(parts, inner, windows.source), workers, depth)

    return replace(parts, batches=batches)


def assert_plain(name: str, windows: Windows) -> None:
    """Raise ValueError where the windows have other values than the rows of the source, judged by a few windows."""
    import numpy as np

    source = windows.source
    refuse_other_windows(name, source)
    spread_B = np.linspace(0, source.count - 1, max(2, source.batch)).astype(np.int64)  # the first and the last
    for rows, values in zip((source.inputs, source.targets), windows.batch(spread_B), strict=True):
        values_BW = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
        for at in range(0, len(spread_B), 1 + len(spread_B) // LOOKED_AT):
            start, window = spread_B[at] * source.stride, values_BW[at]
            plain = np.asarray(rows[start : start + source.window])
            if plain.shape != window.shape or not ((plain == window) | ((plain != plain) & (window != window))).all():
                raise ValueError(
                    f"{name}: its workers cut plain windows out of the source, and these windows have other values: "
                    "leave one of the two strategies out"
                )


def gathered(parts: Parts, windows: Windows, orders: Iterator[Any], workers: int, depth: int) -> Batches:
    """Yield the batches that the workers gather in turn, `depth` batches ahead each."""
    with ExitStack() as stack:
        started = [stack.enter_context(process(serve)) for _ in range(workers)]
        for worker in started:
            with explained("prefetch_process", worker):
                send(worker, windows)
        yield from in_turn(parts, started * depth, orders, ask, lambda worker: answer(worker, windows))


def in_turn(
    parts: Parts, lanes: Sequence[Any], orders: Iterator[Any], ask: Callable[[Any, Any], None], answer: Callable
) -> Batches:
    """Ask the lanes in turn, one batch each at a time; yield their answers in the order of the questions.

    A lane is whatever `ask(lane, indices_B)` and `answer(lane)` need; it is asked again as soon as it has answered.
    """
    waiting: deque[Any] = deque()

    def ask_next(lane: Any) -> None:
        for indices_B in islice(orders, 1):
            ask(lane, indices_B)
            waiting.append(lane)

    for lane in lanes:
        ask_next(lane)
    while waiting:
        lane = waiting.popleft()
        x, y = answer(lane)
        ask_next(lane)
        batch = parts.transfer(parts, x, y)
        del x, y
        yield batch
        del batch


@contextmanager
def process(program: Callable[[], None], lent: Sequence[int] = ()) -> Iterator[Any]:
    """Run a function as the whole program of a worker, with the descriptors `lent`; always end it."""
    worker = subprocess.Popen(
        [sys.executable, "-P", "-c", f"{inspect.getsource(program)}\n{program.__name__}()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        pass_fds=lent,
    )
    try:
        yield worker
    finally:
        worker.kill()  # it has nothing to clean up
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


@contextmanager
def explained(name: str, worker: Any) -> Iterator[None]:
    """Replace a broken pipe by an error with the exit code of the worker."""
    try:
        yield
    except (BrokenPipeError, EOFError):
        code = worker.wait()
        raise RuntimeError(f"{name}: a worker ended with exit code {code}: see its own error above") from None


def send(worker: Any, windows: Windows) -> None:
    """Send the sizes and the rows, piece by piece, so that no second copy is made here."""
    import json

    import numpy as np

    source = windows.source
    both = (source.inputs, source.targets)
    sizes: dict[str, Any] = {"rows": [(rows.dtype.str, rows.shape) for rows in both], "count": source.count}
    sizes |= {"window": source.window, "stride": source.stride, "batch": source.batch}
    worker.stdin.write(json.dumps(sizes).encode() + b"\n")
    for rows in both:
        step = max(1, PIECE * len(rows) // rows.nbytes)
        for start in range(0, len(rows), step):
            worker.stdin.write(np.ascontiguousarray(rows[start : start + step]).reshape(-1).view(np.uint8))
    worker.stdin.flush()


def ask(worker: Any, indices_B: Any) -> None:
    """Ask for one batch."""
    with explained("prefetch_process", worker):
        worker.stdin.write(indices_B.astype("int64").tobytes())
        worker.stdin.flush()


def answer(worker: Any, windows: Windows) -> tuple[Any, Any]:
    """Read one batch, or raise the error of the worker."""
    import numpy as np

    def read(array: Any) -> Any:
        if worker.stdout.readinto(array.reshape(-1).view(np.uint8)) < array.nbytes:
            raise EOFError
        return array

    source = windows.source
    with explained("prefetch_process", worker):
        size = int(read(np.empty(1, np.int64))[0])
        if size:
            raise pickle.loads(read(np.empty(size, np.uint8)).tobytes())
        x, y = (
            read(np.empty((source.batch, source.window, *rows.shape[1:]), rows.dtype))
            for rows in (source.inputs, source.targets)
        )
    return x, y


def holds(extent: Extent, workers: int = 2, depth: int = 2) -> Holding:
    """Count the source in each worker, and the batches that wait there."""
    return Holding(windows=workers * extent.rows * extent.row_bytes, batches=workers * depth * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "prefetch_process",
            rewrites=("batches",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            holds=holds,
            conflicts=dict.fromkeys(
                ("pread", "reservoir", "streaming"), "its processes share arrays, and that leaves rows in their file"
            ),
        )
    ]
