"""The work of a step, counted without running it, and the time it takes on a machine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple


class Operations(NamedTuple):
    """Work of one kind on one dtype: what is multiplied (floating-point operations), and bytes read and written.

    What multiplies nothing has no dtype. The kind is one operator `call`, made so many `times`, with its arguments as
    text; without one it is all work of like intensity.
    """

    dtype: str
    flops: float
    moved: int
    call: str = ""
    times: int = 1


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


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second: floating-point operations of a product by dtype, and bytes read and written.

    `calls` are the seconds of operator calls that were timed on it.
    """

    bandwidth: float
    flops: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, figures: Any) -> "Rates | None":
        """Read rates from plain figures, as records keep them; None for anything else."""
        try:
            flops = {str(dtype): float(rate) for dtype, rate in figures["flops"].items()}
            return cls(float(figures["bandwidth"]), flops)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None


def gathered(operations: Iterable[Operations]) -> tuple[Operations, ...]:
    """Add up operations of the same call; without calls, of one dtype and of like intensity: within a factor of 2."""
    sums: dict[tuple[str, str, int], Operations] = {}
    for each in operations:
        if not (each.flops or each.moved):
            continue
        intensity = round(math.log2(each.flops / max(each.moved, 1))) if each.flops else 0
        dtype = each.dtype if each.flops else ""
        key = (each.call, dtype, intensity)
        before = sums.get(key, Operations(dtype, 0.0, 0, each.call, 0))
        sums[key] = Operations(
            dtype, before.flops + each.flops, before.moved + each.moved, each.call, before.times + each.times
        )
    return tuple(sums[key] for key in sorted(sums))


def by_intensity(operations: Iterable[Operations]) -> tuple[Operations, ...]:
    """Forget the calls: all that a roofline needs, in a few entries."""
    return tuple(each._replace(times=1) for each in gathered(each._replace(call="") for each in operations))


class Estimate(NamedTuple):
    """The seconds of a step, and the share of them that comes from calls that were timed."""

    seconds: float
    timed: float


def estimate(work: Iterable[Operations], rates: Rates) -> Estimate | None:
    """Estimate the time of a step: the sum of its calls, those that were not timed by the roofline.

    A call takes no less than to read and write its bytes: alone it may find in the cache what a step fetches. None
    without work, or where the rate of a dtype is not known.
    """
    total = timed = 0.0
    for each in work:
        if each.call in rates.calls:
            timed += max(each.times * rates.calls[each.call], each.moved / rates.bandwidth)
        elif (bound := roofline(each, rates)) is None:
            return None
        else:
            total += bound
    total += timed
    return Estimate(total, timed / total) if total else None


def roofline(work: Operations, rates: Rates) -> float | None:
    """Return what the slower of the two rates allows (Williams et al., 2009), in seconds; None without the rate."""
    if work.flops and work.dtype not in rates.flops:
        return None
    multiplied = work.flops / rates.flops[work.dtype] if work.flops else 0.0
    return max(multiplied, work.moved / rates.bandwidth)
