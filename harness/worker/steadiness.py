"""Whether the steps of one process are steady: their scatter, their clock, their growth."""

import math
from collections.abc import Sequence
from statistics import median, quantiles

SLICE_SECONDS = 0.01
"""What a scheduler gives to another program at once."""
_SLOPE_POINTS = 1000


def noisy(step_seconds: Sequence[float], involuntary_switches: int = 0) -> bool:
    """Check whether a process's steps scatter: IQR / median > 10 %, or > 50 involuntary switches per second."""
    if involuntary_switches > 50 * math.fsum(step_seconds):
        return True
    if len(step_seconds) < 2:
        return False
    first, middle, third = quantiles(step_seconds, n=4, method="inclusive")
    return third - first > 0.1 * middle


def synchronised(step_seconds: Sequence[float], block_seconds: float) -> bool:
    """Check whether the steps account for at least 90 % of the synchronised wall time around them.

    If not, the clock was read before the work was done, and the times mean nothing. A slice of time in which another
    program had the processor between two readings does not count: steps of 3 ms lost 4 ms of 18 to one.
    """
    return math.fsum(step_seconds) >= 0.9 * (block_seconds - SLICE_SECONDS)


def slope(values: Sequence[float]) -> float:
    """Return the Theil-Sen slope per step: the median over all pairs (Sen 1968), deaf to a few spikes.

    For memory in bytes, a slope that is not zero is a leak. Above 1000 values evenly spaced ones stand for
    the rest, since pairs grow as the square. Raise ValueError below two values or if one is not finite.
    """
    if len(values) < 2:
        raise ValueError(f"a slope needs at least two values, got {len(values)}: record more steps")
    if not all(map(math.isfinite, values)):
        raise ValueError("a slope needs finite values: drop the steps that were not measured")
    count = min(len(values), _SLOPE_POINTS)
    steps = [i * (len(values) - 1) // (count - 1) for i in range(count)]
    return median((values[b] - values[a]) / (b - a) for i, a in enumerate(steps) for b in steps[i + 1 :])
