import math
import random

import pytest

from harness.verdicts.comparisons import Decision, Estimate, between, decided, estimate_of, summary
from harness.verdicts.dunnett import p_value
from harness.verdicts.interval import Interval
from harness.verdicts.pooled import pooled


def test_an_interval_is_students():
    seen = Estimate(1.2, 0.05, 10).interval()
    assert seen.low == pytest.approx(1.2 * math.exp(-2.2281 * 0.05), rel=1e-4)
    assert seen.high == pytest.approx(1.2 * math.exp(2.2281 * 0.05), rel=1e-4)
    assert Estimate(1.2).interval() == Interval(1.2, 1.2)


def test_one_comparison_is_not_corrected():
    estimate = Estimate(1.12, 0.05, 20)  # t = 2.27, p = 0.035
    assert decided([estimate], between(0, 1)) == [Decision(False, estimate.interval())]
    assert [each.outcome for each in decided([estimate] * 6, between(0, 1))] == [None] * 6


@pytest.mark.parametrize("seed", range(20))
def test_outcomes_are_holms(seed):
    rng = random.Random(seed)
    estimates = [Estimate(math.exp(rng.gauss(0, 0.15)), 0.05, 12) for _ in range(6)]
    p_values = [p_value(math.log(each.ratio) / 0.05, 12) for each in estimates]
    expected = [False] * 6
    for step, place in enumerate(sorted(range(6), key=p_values.__getitem__)):
        if p_values[place] * (6 - step) > 0.05:
            break
        expected[place] = True
    outcomes = decided(estimates, lambda _, interval: True if not interval.low <= 1 <= interval.high else None)
    assert [bool(each.outcome) for each in outcomes] == expected


def test_every_outcome_is_that_of_its_interval():
    estimates = [Estimate(r, 0.03, 20) for r in (0.5, 0.7, 1.0, 1.3)]
    for each in decided(estimates, between(0.6, 1.1)):
        outcome = each.interval.low >= 0.6 and each.interval.high <= 1.1
        refuted = each.interval.high < 0.6 or each.interval.low > 1.1
        assert (each.outcome is True, each.outcome is False) == (outcome, refuted)


def test_equal_groups_rarely_decide_anything_wrong():
    rng = random.Random(7)
    wrong = 0
    for _ in range(400):
        estimates = [
            Estimate(math.exp(rng.gauss(0, s)), s, 30)
            for s in (0.05 * math.sqrt(rng.gammavariate(15, 1 / 15)) for _ in range(6))
        ]
        wrong += any(each.outcome is not None for each in decided(estimates, between(1, 1)))
    assert wrong <= 400 * 0.08


def test_exact_figures_are_decided_at_once_and_help_the_rest():
    doubtful = Estimate(1.125, 0.05, 20)
    outcomes = decided([Estimate(2.0), doubtful, Estimate(3.0)], between(1, math.inf))
    assert [each.outcome for each in outcomes] == [True, True, True]
    assert decided([], between(0, 1)) == []


def test_a_sentence_counts():
    interval = Interval(1, 2)
    outcomes = [Decision(each, interval) for each in (True, True, True, False, None, None)]
    assert summary(outcomes) == "3 of 6 groups verified, 1 refuted"
    assert summary(outcomes[:1]) == "1 of 1 group verified"


def test_a_row_is_an_estimate_where_it_was_inferred():
    times = {
        name: {0: 1.0, 1: 1.1, 2: 0.9 + place / 50} for place, name in enumerate(("baseline", "nothing", "a", "b"))
    }
    speed = pooled(times).speeds["a"]
    assert estimate_of(speed) == Estimate(speed.ratio, speed.standard_error, 6)
    assert estimate_of(pooled({"baseline": {0: 1.0}, "a": {0: 1.0}}).speeds["a"]) is None
