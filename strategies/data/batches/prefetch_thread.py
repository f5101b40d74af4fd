"""Make the next batches in a thread while the step runs; pay the batches that wait and the one in the making.

Peak: `depth` + 2 batches: `depth` wait in the queue, one is being made, one is in use. Gathering and transfer overlap
with the step where both release the interpreter's lock, as bulk copies do. The order stays the same. Grain and SPDL
prefetch in threads.
"""

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl


def on_any(parts: Parts, depth: int = 2) -> Parts:
    if depth < 1:
        raise ValueError(f"prefetch_thread: a queue of {depth} batches fetches nothing ahead: set depth to 1 or more")
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        lasting = reserved("prefetch_thread", windows, depth, depth + 2)
        return fetched(lambda: inner(parts, lasting), depth)

    return replace(parts, batches=batches)


def reserved(name: str, windows: Windows, depth: int, batches: int) -> Windows:
    """Reserve so many batches of those that the windows leave as they were; the inner batches keep the rest.

    Raises ValueError where there are fewer.
    """
    lasts = windows.lasts
    if lasts is None:
        return windows
    if lasts < batches:
        largest = lasts - (batches - depth)
        remedy = f"set depth to {largest}" if largest > 0 else "no depth is small enough"
        raise ValueError(
            f"{name} keeps {batches} batches at a time with depth {depth}, but the windows keep only the last {lasts} "
            f"as they were: {remedy}, or let the windows keep {batches}"
        )
    return replace(windows, lasts=lasts - batches + 1)


def fetched(begin: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yield the items of the iterator that `begin` makes, taken by a thread; end the thread when closed."""
    ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    room = Semaphore(depth + 1)  # the batches that wait and the one being made
    closed = False

    def work() -> None:
        flow: Any = None
        try:
            flow = begin()
            while room.acquire() and not closed:
                ready.put((next(flow), None))
        except BaseException as error:  # every error belongs to the consumer of the batch
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
            yield taken()  # no name refers to the batch, so that it can be freed before the wait for the next
    except StopIteration:
        return
    finally:
        closed = True
        room.release()
        thread.join()


def holds(extent: Extent, depth: int = 2) -> Holding:
    """Count the batches that wait and the one being made, beside the batch in use."""
    return Holding(batches=(depth + 1) * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "prefetch_thread", rewrites=("batches",), on={"torch": on_any, "jax": on_any}, about=__doc__, holds=holds
        )
    ]
