"""The pace that a pilot sets: short processes, whose first steps are in no sample."""

import math

import pytest

from harness.run.pacing import Pacing, pace


def test_a_steady_pilot_needs_one_warm_up_step():
    assert pace([9.0] + [0.01] * 29) == Pacing(1, 25)


def test_a_step_that_compiles_is_in_no_sample():
    assert pace([5.0, 5.0, 5.0] + [0.02] * 27).warmup == 3  # a compile at steps 0..2
    assert pace([0.02, 5.0] + [0.02] * 28).warmup == 2  # medians alone would have accepted step 1
    assert pace([0.02] * 30).warmup == 1
    assert pace([1.0] * 6 + [0.95] * 24).warmup == 6  # 5 % between the medians is not steady


def test_the_last_candidate_uses_all_thirty_steps():
    slow = [1.1**-i for i in range(20)]
    assert pace([*slow, *[0.1] * 10]).flags == ()
    assert pace([*slow, *[0.1] * 10]).warmup > 12
    assert pace([1.1**-i for i in range(30)]).flags == ("no_steady_state",)


def test_no_steady_state_warms_up_as_long_as_a_second_lasts():
    falling = [0.1 * 0.9**i for i in range(30)]
    assert pace(falling).warmup == 20
    assert pace(falling).flags == ("no_steady_state",)
    rising = [0.1 * 1.1**i for i in range(12)]
    middle = sorted(rising[1:])[5]
    assert pace(rising) == Pacing(math.floor(1 / middle), 2, ("no_steady_state",))


def test_a_short_pilot_says_so():
    assert pace([0.3, 0.2, 0.2, 0.2]) == Pacing(5, 2, ("short_pilot",))
    assert pace([8.0, 4.0, 4.0]) == Pacing(1, 2, ("short_pilot",))
    assert pace([60.0]) == Pacing(1, 2, ("short_pilot",))


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e-12, 10_000), (1e-5, 10_000), (0.003, 84), (0.1, 3), (0.125, 2), (0.5, 2), (40, 2)]
)
def test_timed_steps_fill_a_quarter_of_a_second_and_are_two_at_least(seconds, steps):
    assert pace([seconds] * 30) == Pacing(1, steps)


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(1e-12, 10_000), (0.001, 1600), (0.02, 80), (0.05, 32), (0.12, 32), (0.2, 20), (0.5, 8), (1.9, 2), (40, 2)],
)
def test_in_turns_each_of_them_is_filled_as_long_as_all_take_four_seconds(seconds, steps):
    assert pace([seconds] * 30, turns=16) == Pacing(1, steps)


@pytest.mark.parametrize("pilot", [[], [1.0, 0.0], [1.0, math.nan], [math.inf], [1.0, -1.0]])
def test_a_bad_pilot_is_refused(pilot):
    with pytest.raises(ValueError, match="pilot"):
        pace(pilot)
