"""Loops whose turns are alike: a prediction takes the first few of them, and a run takes them all."""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol, TypeVar

Turn = TypeVar("Turn", bound=Hashable)


class Recorder(Protocol):
    """What watches a prediction: `mark` is a point of time, `since` what happened from then on.

    `since` is None where it left memory other than it was. `again` counts what happened so many more times.

    `first` is all that the first turn of a loop did since it began. `remember` keeps what the others did from a mark
    on, under the name of the loop; `repeat` has it happen again where a loop of that name is known, and says whether.
    """

    def mark(self) -> Any: ...

    def since(self, mark: Any) -> Any: ...

    def again(self, mark: Any, times: int) -> None: ...

    def first(self, mark: Any) -> Hashable: ...

    def remember(self, loop: Hashable, mark: Any) -> None: ...

    def repeat(self, loop: Hashable) -> bool: ...


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

    Where the loop runs once more, as in each layer, and its first turn does what it did before, so do the others: they
    are left out, and what they did is repeated.
    """
    if not _recorders:
        yield from turns
        return
    runs = sys._getframe(1)
    groups = tuple((each, tuple(group)) for each, group in groupby(turns, size))
    yield from _few(groups, (runs.f_code, runs.f_lasti), _recorders[-1])


def _few(groups: Sequence[tuple[Hashable, tuple[Turn, ...]]], place: Hashable, recorder: Recorder) -> Iterator[Turn]:
    """Yield the first turn, and the others that a prediction needs unless they are repeated."""
    few = (turn for _, group in groups for turn in _first_of(group, recorder))
    began = recorder.mark()
    for turn in few:
        yield turn
        break
    loop = place, groups, recorder.first(began)
    if recorder.repeat(loop):
        return
    rest = recorder.mark()
    yield from few
    recorder.remember(loop, rest)


def _first_of(turns: Sequence[Turn], recorder: Recorder) -> Iterator[Turn]:
    before = None
    for at, turn in enumerate(turns):
        mark = recorder.mark()
        yield turn
        now = recorder.since(mark)
        if now is not None and now == before:
            recorder.again(mark, len(turns) - at - 1)
            return
        before = now
