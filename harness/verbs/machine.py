"""The machine that cases are predicted for: what memory they may take there, and how fast it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from harness.backends.cards import CARDS, key_of
from harness.contract.place import Place
from harness.contract.plugins import ALIKE, nearest, printable
from harness.machine import facts, gpu, throughput
from harness.records import Case
from harness.records.roofline import Rates
from harness.refusal import Refusal
from harness.suite.units import size

ELSEWHERE = "another GPU is asked for than the one here"


class Bound(NamedTuple):
    """So many bytes that a rank of a case may take: those of its budget, or a share of the memory of its place."""

    bytes: int
    of_budget: bool


@dataclass(frozen=True)
class Machine:
    """What cases must fit: bytes of the host and of a GPU; and rates by place.

    None where not known. `cache` is the folder of what is stored between runs: predictions, and the times of operators.
    `card` is the name of the GPU, by which JAX's compiler knows what to compile for. `named` are the devices whose
    memory somebody named: it bounds a case with a budget as well. `here` is the GPU that is there, whatever is named.
    `timing_seconds` is how long operators may be timed that were not yet, None where that is as usual.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None
    rates: Mapping[Place, Rates] | None = None
    cache: Path | None = None
    card: str = ""
    named: frozenset[str] = frozenset()
    here: gpu.Gpu | None = None
    timing_seconds: float | None = None

    def supposing(
        self, memory: str | int | None = None, gpu_memory: str | int | None = None, card: str | None = None
    ) -> "Machine":
        """Return the machine with the sizes of memory and the card that are named, in place of its own."""
        device_bytes = CARDS[card].memory_bytes if card else self.device_bytes
        devices = {"cpu": memory, "cuda": gpu_memory or card}
        return replace(
            self,
            host_bytes=self.host_bytes if memory is None else size(memory, "memory"),
            device_bytes=device_bytes if gpu_memory is None else size(gpu_memory, "gpu memory"),
            card=card or self.card,
            named=self.named | {device for device, name in devices.items() if name},
        )

    def rated(self, places: Iterable[Place]) -> "Machine":
        """Return the machine with the rates of places, but of none elsewhere; those not known yet are measured."""
        assert self.cache is not None
        here = dict.fromkeys(place for place in places if not self.is_elsewhere(place))
        measured = {place: Rates.read(throughput.of_place(place, self.cache)) for place in here}
        return replace(self, rates={place: each for place, each in measured.items() if each is not None})

    def is_elsewhere(self, place: Place) -> bool:
        """Check whether a place is on a GPU that is named, and that is not the one here.

        It is another card, or has more memory: a case may take more of it than programs can use here.
        """
        if place.device != "cuda" or place.device not in self.named or self.here is None:
            return False
        if key_of(self.card) != key_of(self.here.name):
            return True
        taken, usable = self._room(place), self.here.usable_bytes
        return taken is not None and not self.here.mig and taken > usable

    def is_absent(self, place: Place) -> bool:
        """Check whether a place is on a GPU, and none is here."""
        return place.device == "cuda" and self.here is None

    def limit(self, case: Case) -> int | None:
        """Return the bytes that a rank of a case may take: the least of its bounds, None where there is none."""
        return min((bound.bytes for bound in self.bounds(case)), default=None)

    def bounds(self, case: Case) -> list[Bound]:
        """Return what bounds a rank of a case: its own budget, and a share of the memory of its place.

        Beside a budget memory counts only where it was named. Ranks share the host, and have a GPU each.
        """
        budget = [] if case.budget_bytes is None else [Bound(case.budget_bytes, True)]
        room = self._room(case.place, case.ranks)
        if room is None or (budget and case.place.device not in self.named):
            return budget
        return [*budget, Bound(room, False)]

    def host_limit(self, case: Case) -> int | None:
        """Return the bytes of the host that a rank of a case on a GPU may take beside it.

        None on a CPU, whose own memory that is, and where nobody said how much the machine with the GPU has.
        """
        if case.place.device == "cpu":
            return None
        known = "cpu" in self.named or (self.here is not None and not self.is_elsewhere(case.place))
        return self._room(Place(case.place.backend, "cpu"), case.ranks) if known else None

    def _room(self, place: Place, ranks: int = 1) -> int | None:
        """Return the share of the memory of a place that each rank may take, in bytes; None where it is not known."""
        if place.device == "cpu":
            return None if self.host_bytes is None else int(self.host_bytes * facts.HOST_SHARE) // ranks
        return None if self.device_bytes is None else int(self.device_bytes * facts.DEVICE_SHARE)


def card_of(name: str, option: str) -> str:
    """Return the key of a card by any of its names; raise Refusal, with what it was named by, where nobody knows it."""
    key = name if name in CARDS else key_of(name) or key_of(f"rtx {name}")
    if key is None:
        raise Refusal(f"{option}: there is no card '{printable(name)[:40]}'{nearest(name, CARDS, ALIKE)}")
    return key


def this_machine(places: Iterable[Place], cache: Path) -> Machine:
    """Describe the machine that this runs on; rates that are not known yet are measured."""
    here = gpu.detect()
    card = here.name if here is not None else ""
    return Machine(facts.total_bytes(), gpu.usable_bytes(), cache=cache, card=card, here=here).rated(places)
