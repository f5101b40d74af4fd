"""Let a thread make the next batches while the step runs; pay the batches that wait, and one in the making.

Peak: `depth` + 2 batches: `depth` wait in the queue, one is being made, one is in use. Gathering and transfer overlap
with the step as far as both leave the interpreter: bulk copies do. The order stays the same. Grain and SPDL prefetch
in threads.
"""

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from harness import Extent, Held, Parts, Strategy, Windows, hookimpl


def on_any(parts: Parts, depth: int = 2) -> Parts:
    if depth < 1:
        raise ValueError(f"prefetch_thread: a queue of {depth} batches fetches nothing ahead: set depth to 1 or more")
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        lasts = windows.lasts
        if lasts is not None:
            if lasts < depth + 2:
                most = f"set depth to {lasts - 2}" if lasts > 2 else "no depth is small enough"
                raise ValueError(
                    f"prefetch_thread keeps {depth + 2} batches at a time with depth {depth}, but the windows keep "
                    f"only the last {lasts} as they were: {most}, or let the windows keep {depth + 2}"
                )
            windows = replace(windows, lasts=lasts - depth - 1)
        return fetched(lambda: inner(parts, windows), depth)

    return replace(parts, batches=batches)


def fetched(begin: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yield what a thread takes from the iterator that `begin` makes; end the thread when closed."""
    ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    room = Semaphore(depth + 1)  # what waits and what is being made
    closed = False

    def work() -> None:
        flow: Any = None
        try:
            flow = begin()
            while room.acquire() and not closed:
                ready.put((next(flow), None))
        except BaseException as error:  # all of it belongs to whoever asks for the batch
            ready.put((None, error))
        finally:
            if hasattr(flow, "close"):
                flow.close()

    def taken() -> Any:
        batch, error = ready.get()
        room.release()
        if error is not None:
            raise error
        return batch

    thread = Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            yield taken()  # no name holds the batch, so that it can be freed before the next one is waited for
    except StopIteration:
        return
    finally:
        closed = True
        room.release()
        thread.join()


def holds(extent: Extent, depth: int = 2) -> Held:
    """Hold what waits and what is being made, beside the batch in use."""
    return Held(batches=(depth + 1) * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "prefetch_thread",
            rewrites=("batches",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            holds=holds,
        )
    ]
