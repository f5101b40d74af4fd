"""The work of a step, counted without running it, and the time it takes at the rates of a machine."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Operations(NamedTuple):
    """Work of one intensity on one dtype: what is multiplied (floating-point operations), and bytes read and written.

    What multiplies nothing has no dtype.
    """

    dtype: str
    flops: float
    moved: int


class Forecast(NamedTuple):
    """What a run on abstract arrays showed: the peak bytes of each phase, and the work of one steady step.

    `supposed` counts the numbers that the run asked for and that had to be made up: the path that it took is a guess.
    """

    peaks: dict[str, int]
    work: tuple[Operations, ...]
    supposed: int = 0


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second: floating-point operations of a product by dtype, and bytes read and written."""

    bandwidth: float
    flops: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, figures: Any) -> "Rates | None":
        """Read rates from plain figures, as records keep them; None for anything else."""
        try:
            flops = {str(dtype): float(rate) for dtype, rate in figures["flops"].items()}
            return cls(float(figures["bandwidth"]), flops)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None


def gathered(operations: Iterable[Operations]) -> tuple[Operations, ...]:
    """Add up operations of one dtype and of like intensity: within a factor of 2, the same of both rates binds them."""
    sums: dict[tuple[str, int], Operations] = {}
    for each in operations:
        if not (each.flops or each.moved):
            continue
        intensity = round(math.log2(each.flops / max(each.moved, 1))) if each.flops else 0
        key = (each.dtype if each.flops else "", intensity)
        before = sums.get(key, Operations(key[0], 0.0, 0))
        sums[key] = Operations(key[0], before.flops + each.flops, before.moved + each.moved)
    return tuple(sums[key] for key in sorted(sums))


def seconds(work: Iterable[Operations], rates: Rates) -> float | None:
    """Estimate the time of a step: each kind of work takes what the slower of its two rates allows (a roofline).

    Williams et al., 2009. None where the rate of a dtype is not known.
    """
    total = 0.0
    for each in work:
        if each.flops and each.dtype not in rates.flops:
            return None
        multiplied = each.flops / rates.flops[each.dtype] if each.flops else 0.0
        total += max(multiplied, each.moved / rates.bandwidth)
    return total
