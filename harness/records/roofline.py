"""The work of a step, counted without running it, and the time it takes on a machine."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
