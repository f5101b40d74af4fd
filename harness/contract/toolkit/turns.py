"""Loops whose turns are alike: a prediction takes the first few of them, and a run takes them all."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol, TypeVar

Turn = TypeVar("Turn")


class Recorder(Protocol):
    """What watches a prediction: `mark` is a point of time, `since` what happened from then on.

    `since` is None where it left memory other than it was. `again` counts what happened so many more times.
    """

    def mark(self) -> Any: ...

    def since(self, mark: Any) -> Any: ...

    def again(self, mark: Any, times: int) -> None: ...


_recorders: list[Recorder] = []


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Leave out turns for as long as this lasts."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


def alike(turns: Iterable[Turn], size: Callable[[Turn], Hashable]) -> Iterator[Turn]:
    """Yield each turn of a loop, of which those of one `size` do the same to tensors of the same sizes, in place.

    A prediction counts the work of a turn as often as there are turns, but goes on to the next size as soon as two
    turns after each other took and gave back the same memory, in the same order, for the same operators. Where no two
    do, as in a loop that keeps what it makes, it takes every turn.
    """
    if not _recorders:
        yield from turns
        return
    for _, group in groupby(turns, size):
        yield from _first_of(list(group), _recorders[-1])


def _first_of(turns: list[Turn], recorder: Recorder) -> Iterator[Turn]:
    before = None
    for at, turn in enumerate(turns):
        mark = recorder.mark()
        yield turn
        now = recorder.since(mark)
        if now is not None and now == before:
            recorder.again(mark, len(turns) - at - 1)
            return
        before = now
