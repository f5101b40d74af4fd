"""The only training loop. Its calls are the phases of every measurement."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

from harness.contract.parts import ABSENT, Parts
from harness.contract.toolkit.checkpoints import Checkpoint
from harness.refusal import Refusal

Phase = Callable[[str], AbstractContextManager[Any]]


class Meter(Protocol):
    """What watches phases: `enter` ends the running one and begins the next."""

    current: str | None

    def enter(self, name: str | None) -> None: ...


def unobserved(name: str) -> AbstractContextManager[Any]:
    """Observe nothing."""
    return nullcontext()


class Ending(NamedTuple):
    """After how many steps a run ends, and where it is saved."""

    steps: int
    file: Checkpoint


def training(
    parts: Parts,
    step: Callable[..., Any],
    phase: Phase = unobserved,
    finish: Callable[[Any], Any] = lambda outputs: None,
    ending: Ending | None = None,
) -> Generator[tuple[Any, Any], None, None]:
    """Train without end, yielding the loss of each step and what `finish(outputs)` returned for it.

    `finish` gets the state and the loss within the phase of the step: it waits for them, or marks the time. A batch
    is dropped before the next is fetched, so that no strategy is charged for two. With an `ending` so many steps are
    followed by what else a run does, whose loss and resumed state are yielded last.
    """
    with phase("source"):
        source = parts.source(parts)
    with phase("windows"):
        windows = parts.windows(parts, source)
    with phase("batches"):
        batches = iter(parts.batches(parts, windows))
    with phase("init"):
        state = parts.init(parts, source)
        finish(state)
    name = "first_step"
    for fed in count() if ending is None else range(ending.steps):
        with phase("batches"):
            try:
                x, y = next(batches)
            except StopIteration:
                raise Refusal(f"the batches ended after {fed}: give them without end, epoch after epoch") from None
        with phase(name):
            state, loss = step(state, x, y)
            if shape := tuple(getattr(loss, "shape", ())):
                raise Refusal(f"the loss of a step has the shape {list(shape)}: return one number, as `.sum()` does")
            mark = finish((state, loss))
        del x, y
        name = "steady_step"
        yield loss, mark
    if ending is not None:
        states = [state]
        del state
        yield _ended(parts, states, source, batches, phase, finish, ending.file)


def _ended(
    parts: Parts,
    states: list[Any],
    source: Any,
    batches: Iterator[Any],
    phase: Phase,
    finish: Callable[[Any], Any],
    file: Checkpoint,
) -> tuple[Any, Any]:
    """Evaluate, save and resume; take the one state out of the list, so that the resumed one does not lie beside it."""
    if parts.evaluate is ABSENT:
        raise Refusal("this workload ends with its steps: leave out `evaluations`")
    if parts.ranks > 1:
        raise Refusal("a run on several ranks ends with its steps: leave out `evaluations`, or what divides the run")
    with phase("evaluate"):
        loss = parts.evaluate(parts, states[0], islice(batches, parts.shape.evaluations))
        finish((states[0], loss))
    with phase("save"):
        parts.save(parts, states[0], file)
    states.clear()
    with phase("resume"):
        state = parts.resume(parts, source, file)
        return loss, finish((state, loss))
