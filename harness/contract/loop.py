"""The only training loop. Its calls are the phases of every measurement."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from harness.contract.parts import Parts

Phase = Callable[[str], AbstractContextManager[Any]]


class Meter(Protocol):
    """What watches phases: `enter` ends the running one and begins the next."""

    current: str | None

    def enter(self, name: str | None) -> None: ...


def unobserved(name: str) -> AbstractContextManager[Any]:
    """Observe nothing."""
    return nullcontext()


def training(
    parts: Parts,
    step: Callable[..., Any],
    phase: Phase = unobserved,
    finish: Callable[[Any], Any] = lambda outputs: None,
) -> Generator[tuple[Any, Any], None, None]:
    """Train without end, yielding the loss of each step and what `finish(outputs)` returned for it.

    `finish` gets the state and the loss within the phase of the step: it waits for them, or marks the time. A batch
    is dropped before the next is fetched, so that no strategy is charged for two.
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
    while True:
        with phase("batches"):
            x, y = next(batches)
        with phase(name):
            state, loss = step(state, x, y)
            mark = finish((state, loss))
        del x, y
        name = "steady_step"
        yield loss, mark
