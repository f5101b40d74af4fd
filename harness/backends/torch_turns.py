"""Watch the turns of a loop in a prediction for torch: the memory they take and give back, the operators they run."""

from typing import Any

from harness.backends.torch_flops import Work
from harness.backends.torch_storage import LiveStorage


class Turns:
    """Compare what happens to memory between two points of time; see `harness.contract.toolkit.turns`."""

    def __init__(self, live: LiveStorage, work: Work) -> None:
        self._live, self._work = live, work

    def mark(self) -> tuple[int, int, int]:
        """Return how far the changes of memory and the operations have come, and the questions for a number."""
        return len(self._live.ledger.changes), len(self._work.operations), self._live.supposed

    def since(self, mark: tuple[int, int, int]) -> Any:
        """Return the changes in bytes and the operations from there on; None where the changes do not sum to zero."""
        changes, operations, supposed = mark
        changed = [change.size for change in self._live.ledger.changes[changes:]]
        if sum(changed):
            return None
        work = [
            each._replace(call="") for each in self._work.operations[operations:]
        ]  # a turn's number is in its calls
        return changed, work, self._live.supposed - supposed

    def again(self, mark: tuple[int, int, int], times: int) -> None:
        """Count the work from there on so many more times."""
        _, operations, supposed = mark
        again = [
            each._replace(flops=each.flops * times, moved=each.moved * times, times=each.times * times)
            for each in self._work.operations[operations:]
        ]
        self._work.operations += again if times else []
        self._live.supposed += times * (self._live.supposed - supposed)
