"""Watch the turns of a loop in a prediction for torch: the memory they take and give back, the operators they run."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from harness.backends.ledger import Change
from harness.backends.torch_flops import Work
from harness.backends.torch_storage import LiveStorage
from harness.records.roofline import Operations


class Mark(NamedTuple):
    """How far the changes of memory, the blocks and the operations have come, and the questions for a number.

    `counters` are those of `LiveStorage`.
    """

    changes: int
    blocks: int
    operations: int
    supposed: int
    counters: Hashable


class Rest(NamedTuple):
    """What the turns of a loop did behind its first: changes of memory, operations, and questions for a number."""

    changes: list[Change]
    operations: list[Operations]
    supposed: int


class Turns:
    """Compare what happens to memory between two points of time; see `harness.contract.toolkit.turns`."""

    def __init__(self, live: LiveStorage, work: Work) -> None:
        self._live, self._work = live, work
        self._rests: dict[Hashable, Rest] = {}

    def mark(self) -> Mark:
        """Return this point of time."""
        ledger = self._live.ledger
        blocks, operations = len(ledger.makers), len(self._work.operations)
        return Mark(len(ledger.changes), blocks, operations, self._live.supposed, self._live.counters())

    def since(self, mark: Mark) -> Any:
        """Return the changes in bytes and the operations from there on; None where the changes do not sum to zero."""
        changed = [change.size for change in self._live.ledger.changes[mark.changes :]]
        if sum(changed):
            return None
        work = [
            each._replace(call="") for each in self._work.operations[mark.operations :]
        ]  # a turn's number is in its calls
        return changed, work, self._live.supposed - mark.supposed

    def again(self, mark: Mark, times: int) -> None:
        """Count the work from there on so many more times."""
        again = [
            each._replace(flops=each.flops * times, moved=each.moved * times, times=each.times * times)
            for each in self._work.operations[mark.operations :]
        ]
        self._work.operations += again if times else []
        self._live.supposed += times * (self._live.supposed - mark.supposed)

    def first(self, mark: Mark) -> Hashable:
        """Return what the first turn of a loop did from there on, to which memory, and in which part of the run."""
        live = self._live
        changes = tuple((max(block - mark.blocks, -1), size) for block, size in live.ledger.changes[mark.changes :])
        return (
            *(live.current, live.where(), torch.is_grad_enabled(), torch._C._current_graph_task_id() != -1),
            *(changes, tuple(live.ledger.makers[mark.blocks :]), tuple(self._work.operations[mark.operations :])),
            live.supposed - mark.supposed,
        )

    def remember(self, loop: Hashable, mark: Mark) -> None:
        """Keep what the rest of a loop did from there on, if it can be done again: all it began ended, and no more."""
        live = self._live
        changes = live.ledger.changes[mark.changes :]
        began = range(mark.blocks, len(live.ledger.makers))
        whole = all(block in began for block, _ in changes) and len(changes) == 2 * len(began)
        phases = {maker.phase for maker in live.ledger.makers[mark.blocks :]}
        if whole and phases <= {live.current or ""} and live.counters() == mark.counters:
            self._rests[loop] = Rest(changes, self._work.operations[mark.operations :], live.supposed - mark.supposed)

    def repeat(self, loop: Hashable) -> bool:
        """Do once more what the rest of a loop did; return whether it is known."""
        rest = self._rests.get(loop)
        if rest is None:
            return False
        self._live.repeat(rest.changes)
        self._work.operations += rest.operations
        self._live.supposed += rest.supposed
        return True
