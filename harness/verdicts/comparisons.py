"""Several comparisons that decide one claim together, corrected so that the whole claim errs no more often than one.

Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979), 65-70.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.verdicts import dunnett
from harness.verdicts.interval import Interval
from harness.verdicts.pooled import ERROR, Speed


@dataclass(frozen=True)
class Estimate:
    """A ratio, the standard error of its logarithm and the degrees of freedom of that; an error of 0 is exact."""

    ratio: float
    standard_error: float = 0.0
    degrees: int = 2

    def interval(self, error: float = ERROR) -> Interval:
        """Return where the true ratio lies but for a chance of `error`."""
        if not self.standard_error:
            return Interval(self.ratio, self.ratio)
        factor = math.exp(dunnett.quantile(1, 0.0, self.degrees, error) * self.standard_error)
        return Interval(self.ratio / factor, self.ratio * factor)


@dataclass(frozen=True)
class Decision:
    """One comparison: True, False, or None where it is open, and the interval that decided or left it open."""

    outcome: bool | None
    interval: Interval


def estimate_of(speed: Speed) -> Estimate | None:
    """Return what a row's time says for a claim; None where it has a range and no standard error."""
    return None if speed.standard_error is None else Estimate(speed.ratio, speed.standard_error, speed.degrees)


def decided(
    estimates: Sequence[Estimate],
    decide: Callable[[int, Interval], bool | None],
    error: float = ERROR,
) -> list[Decision]:
    """Decide the comparisons of one claim, so that the chance of any wrong outcome is at most `error`.

    `decide` is asked with the place of a comparison and an interval of its ratio, and answers True, False or None; a
    wider interval must not decide what a narrower one leaves open. Intervals have error / k while k comparisons are
    open: every one decided makes those of the others narrower (Holm).
    """
    outcomes: dict[int, Decision] = {}
    while undecided := [place for place in range(len(estimates)) if place not in outcomes]:
        intervals = {place: estimates[place].interval(error / len(undecided)) for place in undecided}
        answers = {place: decide(place, interval) for place, interval in intervals.items()}
        fresh = {place: Decision(each, intervals[place]) for place, each in answers.items() if each is not None}
        outcomes |= fresh
        if not fresh:
            outcomes |= {place: Decision(None, interval) for place, interval in intervals.items()}
    return [outcomes[place] for place in range(len(estimates))]


def between(low: float, high: float) -> Callable[[int, Interval], bool | None]:
    """Return a `decide` for ratios claimed to lie from `low` to `high`; either may be infinite or 0."""

    def decide(place: int, interval: Interval) -> bool | None:
        if low <= interval.low and interval.high <= high:
            return True
        return False if interval < low or interval > high else None

    return decide


def summary(decisions: Sequence[Decision]) -> str:
    """Return how many of the groups decided which way: "3 of 6 groups verified, 1 refuted"."""
    verified, refuted = (sum(each.outcome is way for each in decisions) for way in (True, False))
    groups = f"{len(decisions)} group" + "s" * (len(decisions) != 1)
    return f"{verified} of {groups} verified" + f", {refuted} refuted" * bool(refuted)
