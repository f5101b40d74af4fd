"""Work on many cases in several processes at once, where nothing of them is measured."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from harness.machine import facts
from harness.records import Case, Record

Watch = Callable[[str], None]
Result = tuple[Case, Record]


class _Stopped(Exception):
    """Nobody waits for the results any more."""


def shared_out(
    cases: Sequence[Case],
    work: Callable[[Sequence[Case], Watch], Iterator[Result]],
    watch: Watch,
    most: int | None = None,
) -> Generator[Result, None, None]:
    """Share the cases out among as many threads as a worker has, or `most`; yield what `work` gives, in no order.

    Each thread calls `work` with its share and a watch that raises when the reader has stopped, so that all workers
    end with it. What `work` raises is raised here.
    """
    count = min(facts.threads(), len(cases), most or len(cases))
    if count < 2:
        yield from work(cases, watch)
        return
    stop = threading.Event()
    results: SimpleQueue[Result | BaseException | None] = SimpleQueue()

    def watched(phase: str) -> None:
        if stop.is_set():
            raise _Stopped
        watch(phase)

    def share(at: int) -> None:
        try:
            for each in work(cases[at::count], watched):
                results.put(each)
            results.put(None)
        except BaseException as error:  # whatever it is, the thread that reads raises it
            results.put(error)

    with ThreadPoolExecutor(count) as threads:
        try:
            for at in range(count):
                threads.submit(share, at)
            ended = 0
            while ended < count:
                each = results.get()
                if isinstance(each, BaseException):
                    raise each
                if each is None:
                    ended += 1
                else:
                    yield each
        finally:
            stop.set()
