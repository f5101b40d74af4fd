"""What a run on abstract arrays shows: its memory, what stands at the peak, and its work."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from harness.records.roofline import Operations

NONE: Mapping[str, int] = MappingProxyType({})


class Standing(NamedTuple):
    """Memory of one kind at the peak: the part of the run and the operator that made it, bytes, number of tensors."""

    where: str
    operator: str
    bytes: int
    tensors: int


SHOWN = 10
"""Kinds of memory at the peak that are told apart; the rest is one."""


def largest(standing: Sequence[Standing]) -> tuple[Standing, ...]:
    """Return the largest kinds of memory at a peak, and the sum of the rest."""
    rest = standing[SHOWN:]
    if not rest:
        return tuple(standing)
    others = Standing("the rest", "", sum(each.bytes for each in rest), sum(each.tensors for each in rest))
    return (*standing[:SHOWN], others)


class Forecast(NamedTuple):
    """What a run on abstract arrays showed: the peak bytes of each phase, and the work of one steady step.

    `supposed` counts the numbers that the run asked for and that had to be made up: the path that it took is a guess.
    `stages` are the bytes held after each stage of the first step, `kinds` the most that each kind takes at any time.
    Of a GPU there are the peaks of what its allocator takes from the driver (`reserved_bytes`), of what the driver
    counts for the process (`driver_bytes`), and of what lies in the memory of the host instead (`host_bytes`).
    `base_bytes` were allocated there before the run, and are in none of `peaks`.
    `standing` is what stands at the highest peak, the largest first. `target` is the card that a program was compiled
    for, where that decides something.
    """

    peaks: dict[str, int]
    work: tuple[Operations, ...]
    supposed: int = 0
    stages: Mapping[str, int] = NONE
    kinds: Mapping[str, int] = NONE
    reserved_bytes: int | None = None
    driver_bytes: int | None = None
    host_bytes: int | None = None
    standing: tuple[Standing, ...] = ()
    target: str = ""
    base_bytes: int = 0
