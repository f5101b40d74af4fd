"""What memory a run on abstract arrays took and gave back, who took it, and for what."""

from collections.abc import Sequence
from typing import NamedTuple

from harness.contract import kinds
from harness.records.forecast import Standing

MADE_IN = {"batches": "batch", "forward": "activations", "loss": "logits"}
"""The kind of what a phase makes, where nothing names it."""


class Change(NamedTuple):
    """A block of memory by its number, and the bytes that were taken for it, or with a minus given back."""

    block: int
    size: int


class Maker(NamedTuple):
    """The phase in which a block was made, the part of the run that made it, the operator, and the memory it lies in.

    The last has a name where a run has several memories.
    """

    phase: str
    part: str
    operator: str
    room: str = ""


class Ledger:
    """The changes of a run in their order; blocks have a maker, and a kind where somebody names it."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.makers: list[Maker] = []
        self._kinds: dict[int, str] = {}

    def began(self, size: int, maker: Maker) -> int:
        """Note that memory was taken; return the number of the block."""
        block = len(self.makers)
        self.makers.append(maker)
        self.changes.append(Change(block, size))
        return block

    def ended(self, block: int, size: int) -> None:
        """Note that the memory of a block was given back."""
        self.changes.append(Change(block, -size))

    def name(self, block: int, kind: str) -> None:
        """Say of which kind a block is."""
        self._kinds[block] = kind

    def standing(self, changes: int, room: str = "") -> tuple[Standing, ...]:
        """Return what stood in a memory after so many changes, by who made it, the largest first."""
        sizes = _sums(self.changes[:changes])
        by_maker: dict[tuple[str, str], list[int]] = {}
        for block, size in sizes.items():
            maker = self.makers[block]
            if size and maker.room == room:
                by_maker.setdefault((maker.part, maker.operator), []).append(size)
        standing = (Standing(*maker, sum(each), len(each)) for maker, each in by_maker.items())
        return tuple(sorted(standing, key=lambda each: each.bytes, reverse=True))

    def most(self) -> dict[str, int]:
        """Return the most bytes that each kind took at any time; what was not named is of the phase that made it."""
        now: dict[str, int] = {}
        most: dict[str, int] = {}
        for block, size in self.changes:
            kind = self._kind(block)
            now[kind] = now.get(kind, 0) + size
            most[kind] = max(most.get(kind, 0), now[kind])
        return {kind: most[kind] for kind in kinds.KINDS if kind in most}

    def _kind(self, block: int) -> str:
        phase = self.makers[block].phase
        return self._kinds.get(block) or MADE_IN.get(phase.rpartition("/")[2], "workspace")


def _sums(changes: Sequence[Change]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for block, size in changes:
        sizes[block] = sizes.get(block, 0) + size
    return sizes
