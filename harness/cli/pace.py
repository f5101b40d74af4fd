"""How long the open tasks of a run will take, learned from this run and from earlier results."""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from harness.contract.place import Place
from harness.records import Slot
from harness.records.roofline import Operations

USUAL_SECONDS = {
    "torch": {"predict": 0.4, "numerics": 1.0, "memory": 1.5, "pilot": 5.0},
    "jax": {"predict": 0.9, "numerics": 2.5, "memory": 6.5, "pilot": 3.5},
}
"""How long a task takes with a backend, until something has shown it; one of memory, beside its steps.

About the means of the committed results of two cores; in JAX memory is measured of a program that is compiled anew.
"""
OTHERS = 2.0
"""The same of tasks that are not named there."""
STEPS = 6
"""Steps of a task of memory."""
INSTANT = 0.001
"""Seconds that any task takes at least."""
FLOPS = {"cpu": 1e11, "cuda": 1e14}
BANDWIDTH = {"cpu": 1e10, "cuda": 1e12}
"""What a device does in a second."""


class Pace:
    """How long tasks take: as is expected, times how much longer those of their kind and place took in this run.

    Expected is what a task took in earlier results, or else the usual; of memory, by the work of a step. Rounds have a
    way of their own (`timing`).
    """

    def __init__(self) -> None:
        self.before: dict[tuple[str, str], float] = {}
        self.places: dict[str, Place] = {}
        self.step_seconds: dict[str, float] = {}
        self.steps_of_all = 0.0
        self.took: dict[tuple[str, Place | None], float] = defaultdict(float)
        self.expected_of: dict[tuple[str, Place | None], float] = defaultdict(float)
        self.memory: dict[str, float] = {}
        self.unsupported: frozenset[str] = frozenset()
        self.last = time.monotonic()

    def earlier(self, seconds: Mapping[Slot, float]) -> None:
        """Learn from what each task took in earlier results."""
        self.before = {(slot.kind, slot.case): each for slot, each in seconds.items() if not slot.repeat and each}

    def at(self, places: Mapping[str, Place]) -> None:
        """Note where cases run, by digest."""
        self.places |= places

    def predicted(self, case: str, work: Sequence[Operations], place: Place) -> None:
        """Note where a case runs, and the work of a step of it."""
        self.at({case: place})
        if work:
            flops, bandwidth = FLOPS[place.device], BANDWIDTH[place.device]
            self.steps_of_all -= self.step_seconds.get(case, 0.0)
            self.step_seconds[case] = sum(each.flops / flops + each.moved / bandwidth for each in work)
            self.steps_of_all += self.step_seconds[case]

    def begin(self) -> None:
        """Note that a task begins now."""
        self.last = time.monotonic()

    def ended(self, slot: Slot, whole: bool) -> None:
        """Note that a task has ended now; of memory, what was cut short shows nothing."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        if (slot.kind == "memory" and not whole) or (slot.kind != "predict" and slot.case in self.unsupported):
            return
        if slot.kind == "memory":
            self.memory[slot.case] = seconds
        expected = self.expected(slot.kind, slot.case)
        for place in {self.places.get(slot.case), None}:
            self.took[slot.kind, place] += seconds
            self.expected_of[slot.kind, place] += expected

    def expected(self, kind: str, case: str) -> float:
        """Return how many seconds a task was expected to take."""
        if (before := self.before.get((kind, case))) is not None:
            return before
        place = self.places.get(case)
        usual = USUAL_SECONDS["jax" if place is not None and place.backend == "jax" else "torch"].get(kind, OTHERS)
        if kind != "memory" or not self.step_seconds:
            return usual
        known = self.step_seconds.get(case)
        return usual + STEPS * (self.steps_of_all / len(self.step_seconds) if known is None else known)

    def left(self, kind: str, cases: Mapping[str, int]) -> float:
        """Return the seconds that tasks of a kind will take, so many of each case."""
        expected: dict[Place | None, float] = defaultdict(float)
        for case, many in cases.items():
            if kind == "predict" or case not in self.unsupported:
                expected[self.places.get(case)] += many * self.expected(kind, case)
        return sum(seconds * self.ratio(kind, place) for place, seconds in expected.items())

    def ratio(self, kind: str, place: Place | None) -> float:
        """Return how much longer tasks take than expected: those of a place, or of all places where none has ended."""
        of = place if self.expected_of.get((kind, place)) else None
        expected = self.expected_of.get((kind, of))
        return self.took[kind, of] / expected if expected else 1.0

    def memory_of(self, cases: Collection[str]) -> float:
        """Return the seconds in which the memory of one of these cases is measured, on average."""
        seconds = sum(self.memory.get(case) or self.left("memory", {case: 1}) for case in cases)
        return max(INSTANT, seconds / len(cases))
