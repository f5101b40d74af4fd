"""Turn raw step times into a ratio, an interval and a verdict.

The process is the unit: steps inside one process are strongly correlated, so each process contributes one
median and nothing else. Times are compared as ratios within a round, whose members ran next to each other,
so a slow drift of the machine cancels. Pure standard library, because the parent process imports it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MARGIN = 0.02
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Effect:
    """A strategy's time as a multiple of the baseline's; above 1 is slower.

    `low` to `high` is the exact interval of the median at confidence `level`; below 6 rounds no interval
    exists, `level` is None and they are the range of `ratios`, which holds one ratio per round in the order
    given.
    """

    rounds: int
    ratio: float
    low: float
    high: float
    level: float | None
    ratios: tuple[float, ...]


def interval_rank(rounds: int) -> tuple[int, float] | None:
    """Return rank k and exact level of the interval [d_(k), d_(R+1-k)] of a median of R rounds, None below 6.

    k is the largest rank whose level is at least 95 %; the level is 1 - 2^(1-R) sum over i < k of C(R, i),
    whatever the distribution (the sign-test interval: David and Nagaraja, Order Statistics, section 7.1).
    """
    if rounds < 1:
        return None
    half = 2 ** (rounds - 1)
    outside, best = 0, None
    for k in range(1, rounds // 2 + 1):
        outside += math.comb(rounds, k - 1)
        level = (half - outside) / half
        if level < CONFIDENCE:
            break
        best = (k, level)
    return best


def effect(strategy: Sequence[float], baseline: Sequence[float]) -> Effect:
    """Compare paired medians, one of each per round, in seconds.

    Raise ValueError if there is no round, a time lacks its partner, or a time is not a positive finite
    number.
    """
    if len(strategy) != len(baseline):
        raise ValueError(
            f"the strategy has {len(strategy)} rounds and the baseline {len(baseline)}: pass only complete rounds"
        )
    _check_seconds(strategy, "the strategy's medians")
    _check_seconds(baseline, "the baseline's medians")
    logs = [math.log(s) - math.log(b) for s, b in zip(strategy, baseline, strict=True)]
    ordered = sorted(logs)
    ranked = interval_rank(len(ordered))
    k, level = ranked if ranked is not None else (1, None)
    return Effect(
        rounds=len(ordered),
        ratio=math.exp(median(ordered)),
        low=math.exp(ordered[k - 1]),
        high=math.exp(ordered[-k]),
        level=level,
        ratios=tuple(math.exp(d) for d in logs),
    )


def half_width(effect: Effect) -> float:
    """Return half the interval (or range) as a fraction: the h of "unresolved, +-h %"."""
    return math.sqrt(effect.high / effect.low) - 1


def deviation(effect: Effect) -> float:
    """Return how far the effect is from 1 as a fraction, the same for twice as fast and twice as slow."""
    return max(effect.ratio, 1 / effect.ratio) - 1


def speed_verdict(effect: Effect, margin: float) -> str:
    """Return "faster", "slower", "same" or "unresolved".

    From 6 rounds: faster or slower if the interval excludes 1 and the effect is at least `margin`; same if
    the interval lies strictly between 1 / (1 + margin) and 1 + margin. With 3 to 5 rounds: faster or slower
    only if every round lies beyond the margin on the same side, never same. With 1 or 2: always unresolved.
    """
    if effect.level is None:
        if effect.rounds < 3:
            return "unresolved"
        if effect.low > 1 + margin:
            return "slower"
        return "faster" if effect.high < 1 / (1 + margin) else "unresolved"
    if deviation(effect) >= margin and (effect.low > 1 or effect.high < 1):
        return "slower" if effect.low > 1 else "faster"
    return "same" if 1 / (1 + margin) < effect.low and effect.high < 1 + margin else "unresolved"


def control_clean(control: Effect, margin: float = MARGIN) -> bool:
    """Say whether the strategy that changes nothing looked like it; if not, its group earns no speed verdict.

    Not clean: an interval that excludes 1, however near; below 6 rounds, a range that would earn a verdict.
    """
    if control.level is None:
        return speed_verdict(control, margin) == "unresolved"
    return control.low <= 1 <= control.high


def group_margin(control: Effect | None, margin: float = MARGIN) -> float:
    """Return the larger of `margin` and the control's deviation: two equal things differed by that much."""
    return margin if control is None else max(margin, deviation(control))


def sign_test(effect: Effect) -> float:
    """Return the exact two-sided p-value of "neither is faster", at least 2^(1-R). Ties are left out."""
    slower = sum(ratio > 1 for ratio in effect.ratios)
    faster = sum(ratio < 1 for ratio in effect.ratios)
    trials = slower + faster
    tail = sum(math.comb(trials, i) for i in range(min(slower, faster) + 1))
    return float(min(1.0, tail / 2 ** (trials - 1)))


def holm(p_values: Sequence[float], error: float = 1 - CONFIDENCE) -> list[bool]:
    """Say, in the order given, which hypotheses fall when all are tested at once (Holm 1979).

    "The fastest of k" needs it: six rounds cannot carry three strategies.
    """
    rejected = [False] * len(p_values)
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] * (len(p_values) - step) > error:
            break
        rejected[index] = True
    return rejected


def _check_seconds(values: Sequence[float], what: str) -> None:
    if not values:
        raise ValueError(f"{what} are empty: measure at least one")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{what} hold {value!r} at position {index}: pass positive finite seconds")
