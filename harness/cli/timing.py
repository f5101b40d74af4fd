"""How long the rounds of the comparisons of a run will take, learned from this run and from earlier results."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from harness.cli.pace import Pace
from harness.contract.place import Place
from harness.records import Slot
from harness.verdicts import looks

STAY = 0.4
"""The share of rows that are timed on after a look at the times: of 784 rows a third after the first look, and of the
rest two thirds after each other one."""


@dataclass
class Timing:
    """Cases that are timed together, by digest, and the seconds that are left for their rounds.

    `round` is the one they are in. Each row of a round is `done` once, in `spent` seconds together. `before` has how
    many rows earlier results have of each round, in `spent_before` seconds together.
    """

    cases: frozenset[str]
    seconds: float
    round: int = -1
    done: int = 0
    spent: float = 0.0
    before: Counter[int] = field(default_factory=Counter)
    spent_before: float = 0.0
    place: Place | None = None

    def earlier(self, slot: Slot, seconds: float) -> None:
        """Note what a row took in a round of earlier results."""
        self.before[slot.round] += 1
        self.spent_before += seconds

    def ended(self, slot: Slot, seconds: float, is_new: bool) -> None:
        """Note what a process took: a row may have several in a round."""
        self.round = slot.round
        self.seconds -= seconds
        self.spent += seconds
        self.done += is_new

    @property
    def each(self) -> float | None:
        """The seconds of a row in a round; None where nothing has shown them."""
        if self.done:
            return self.spent / self.done
        return self.spent_before / self.before.total() if self.before else None

    def left(self, each: float, rows: Mapping[int, int], planned: Collection[int]) -> float:
        """Return how long its open rounds will take, in seconds, where a row of a round takes `each`.

        No round begins after the time is spent, and one that has begun is timed to its end.
        """
        count = 0.0
        for number in sorted(rows):
            if number > self.round and each * count > self.seconds:
                break
            count += rows[number] * self.share(number, planned)
        return each * count

    def share(self, number: int, planned: Collection[int]) -> float:
        """Return the share of its rows that will be timed in a round: as in earlier results, or some leave at looks."""
        if number <= self.round:
            return 1.0
        if rows := self.before[max(0, self.round)]:
            return min(1.0, self.before[number] / rows)
        return STAY ** sum(self.round < look <= number for look in planned)


def left(timings: Sequence[Timing], rounds: Mapping[int, Mapping[int, int]], pace: Pace) -> float:
    """Return how long all open rounds will take, in seconds; `rounds` has their rows, by timing and number.

    Where nothing has shown what a row takes, it is as much longer than its memory as with other rows of its place; with
    another backend memory shows nothing, and rows take as long as others.
    """
    timed = [(timing.place, timing.each or 0.0, pace.memory_of(timing.cases)) for timing in timings if timing.done]
    usual = sum(each for _, each, _ in timed) / len(timed) if timed else None
    ratios = {
        place: sum(each for at, each, _ in timed if at == place) / sum(of for at, _, of in timed if at == place)
        for place in {place for place, _, _ in timed}
    }
    last = max((number for rows in rounds.values() for number in rows), default=-1)
    planned = looks.planned(last + 1) if last >= 0 else ()
    seconds = 0.0
    for at, rows in rounds.items():
        timing = timings[at]
        each = timing.each
        if each is None:
            memory = pace.memory_of(timing.cases)
            each = memory * ratios[timing.place] if timing.place in ratios else usual or memory
        seconds += timing.left(each, rows, planned)
    spent = sum(timing.spent for timing in timings)
    return seconds * min(1.0, pace.took["time", None] / spent) if spent else seconds  # machines time side by side
