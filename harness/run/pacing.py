"""How many steps a process is timed for, and how many come before them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

LEAST_STEPS, MOST_STEPS = 2, 10_000
TIMED_SECONDS, WARMUP_SECONDS = 0.25, 1.0
"""What timed steps fill, and what a warm-up without end may take: processes scatter more than the steps within one, so
that many short ones say more than a few long ones."""
TURN_SECONDS, LONGEST_SECONDS = 0.1, 4.0
"""What a turn fills at least, where processes take turns, and what all turns of a process may take. Each is a look at
the moment that the others see too, so that many of them are worth their time."""
_LONGEST_WARMUP, _SHORTEST_PILOT = 20, 12


@dataclass(frozen=True)
class Pacing:
    """Warm-up and timed steps of every round, and what was doubtful about choosing them."""

    warmup: int
    steps: int
    flags: tuple[str, ...] = ()


UNKNOWN = Pacing(2, LEAST_STEPS, ("no_steady_state",))
"""What is taken where a pilot failed."""


def pace(pilot_seconds: Sequence[float], turns: int = 1) -> Pacing:
    """Choose warm-up W and timed steps n from a pilot: its first 30 steps, or the first and those of 10 s after it.

    `pilot_seconds[0]` is the first step of its process, which may compile and is in no sample, since every process
    takes it apart. W is the smallest w in 1..20 where steps w..w+4 and w+5..w+9 have medians within 2 % and step w is
    no outlier of those after it (above Q3 + 1.5 IQR). Without one W is as many of 20 as fit in a second, at least 1,
    and the flag is `no_steady_state`, or `short_pilot` below 12 steps. n fills a quarter of a second, and with several
    `turns` each of them, as far as all together last 4 s; within 2 to 10 000 steps. Raise ValueError if a time is not a
    positive finite number.
    """
    if not pilot_seconds or not all(math.isfinite(seconds) and seconds > 0 for seconds in pilot_seconds):
        raise ValueError("the pilot's step times are not all positive and finite: time at least one step")
    pilot = list(pilot_seconds)
    flags: tuple[str, ...] = ()
    steady = next((w for w in range(1, min(_LONGEST_WARMUP, len(pilot) - 10) + 1) if _steady(pilot, w)), None)
    if steady is not None:
        warmup, seconds = steady, median(pilot[steady:])
    else:
        seconds = median(pilot[1:] or pilot)
        warmup = max(1, min(_LONGEST_WARMUP, math.floor(WARMUP_SECONDS / max(seconds, 1e-9))))
        flags = ("short_pilot" if len(pilot) < _SHORTEST_PILOT else "no_steady_state",)
    seconds = max(seconds, 1e-9)  # the unit of the clock keeps it finite
    steps = math.ceil(TIMED_SECONDS / seconds)
    if turns > 1:
        full = turns * max(LEAST_STEPS, math.ceil(TURN_SECONDS / seconds))  # the first step of a turn has cold caches
        steps = max(steps, min(full, math.floor(LONGEST_SECONDS / seconds)))
    return Pacing(warmup, max(LEAST_STEPS, min(steps, MOST_STEPS)), flags)


def _steady(pilot: list[float], w: int) -> bool:
    first, third = quantiles(pilot[w + 1 :], n=4, method="inclusive")[::2]
    level = abs(median(pilot[w : w + 5]) / median(pilot[w + 5 : w + 10]) - 1) < 0.02
    return level and pilot[w] <= third + 1.5 * (third - first)
