"""How many steps a process is timed for, and in which order processes run."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from harness.verdicts.effects import _check_seconds

_LONGEST_WARMUP, _WARMUP_SECONDS = 20, 10.0
_SHORTEST_PILOT = 12


@dataclass(frozen=True)
class Pacing:
    """Warm-up and timed steps of every round, and what was doubtful about choosing them."""

    warmup: int
    steps: int
    flags: tuple[str, ...]


def pace(pilot_seconds: Sequence[float]) -> Pacing:
    """Choose warm-up W and timed steps n from a pilot: its first 30 steps, or as many as ran in 10 s.

    `pilot_seconds[0]` is the first step of its process, which may compile; it is in no sample because W >=
    1. W is the smallest w in 1..20 where steps w..w+4 and w+5..w+9 have medians within 2 % and step w is no
    outlier of those after it (above Q3 + 1.5 IQR). Without one W is as many of 20 as fit in 10 s, at least
    2, and the flag is `no_steady_state`, or `short_pilot` below 12 steps. n fills about a second, within 10
    to 10 000 steps and 30 s, never below 3; `few_steps` below 10. Raise ValueError if a time is not a
    positive finite number.
    """
    _check_seconds(pilot_seconds, "the pilot's step times")
    pilot = list(pilot_seconds)
    flags = []
    steady = next((w for w in range(1, min(_LONGEST_WARMUP, len(pilot) - 10) + 1) if _steady(pilot, w)), None)
    if steady is not None:
        warmup, seconds = steady, median(pilot[steady:])
    else:
        seconds = median(pilot[1:] or pilot)
        warmup = max(2, min(_LONGEST_WARMUP, math.floor(_WARMUP_SECONDS / seconds)))
        flags.append("short_pilot" if len(pilot) < _SHORTEST_PILOT else "no_steady_state")
    seconds = max(seconds, 1e-9)  # the unit of the clock; keeps 1 / x finite
    steps = max(3, min(max(10, math.ceil(1 / seconds)), math.floor(30 / seconds), 10_000))
    if steps < 10:
        flags.append("few_steps")
    return Pacing(warmup, steps, tuple(flags))


def _steady(pilot: list[float], w: int) -> bool:
    first, third = quantiles(pilot[w + 1 :], n=4, method="inclusive")[::2]
    level = abs(median(pilot[w : w + 5]) / median(pilot[w + 5 : w + 10]) - 1) < 0.02
    return level and pilot[w] <= third + 1.5 * (third - first)


def shuffled(members: Sequence[str], seed: int, round: int) -> list[str]:
    """Return one round's members in random order, the same for the same seed and round on every Python."""
    # Python promises that random() repeats across versions, not that shuffle() does. A string seed is
    # independent of PYTHONHASHSEED.
    draw = random.Random(f"{seed}/{round}").random
    return sorted(members, key=lambda _: draw())
