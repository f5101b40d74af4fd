"""Verdicts from simulated step times whose truth is known."""

import math
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.run.pacing import Pacing, pace, shuffled
from harness.verdicts.effects import (
    MARGIN,
    Effect,
    control_clean,
    deviation,
    effect,
    group_margin,
    half_width,
    holm,
    interval_rank,
    sign_test,
    speed_verdict,
)
from harness.worker.steadiness import noisy, slope, synchronised

NOISE = 0.025  # the deviation between processes that do the same


def medians(rng: random.Random, rounds: int, factor: float = 1.0, noise: float = NOISE) -> list[float]:
    return [0.1 * factor * math.exp(rng.gauss(0, noise)) for _ in range(rounds)]


def judged(rng: random.Random, rounds: int, factor: float) -> str:
    """Judge one simulated group the whole way: control gate, margin, verdict."""
    baseline = medians(rng, rounds)
    control = effect(medians(rng, rounds), baseline)
    if not control_clean(control):
        return "withheld"
    return speed_verdict(effect(medians(rng, rounds, factor), baseline), group_margin(control))


# the interval


@pytest.mark.parametrize("rounds", range(6, 21))
def test_rank_is_the_largest_whose_binomial_level_reaches_95_percent(rounds):
    rank = interval_rank(rounds)
    assert rank is not None
    levels = {k: 1 - sum(math.comb(rounds, i) for i in range(k)) / 2 ** (rounds - 1) for k in range(1, 10)}
    expected = max(k for k, level in levels.items() if level >= 0.95)
    assert rank == (expected, pytest.approx(levels[expected], abs=1e-15))


def test_ranks_and_levels_are_the_published_ones():
    table = {6: (1, 96.88), 9: (2, 96.09), 12: (3, 96.14), 15: (4, 96.48), 20: (6, 95.86)}
    for rounds, (k, percent) in table.items():
        rank = interval_rank(rounds)
        assert rank is not None
        assert (rank[0], round(100 * rank[1], 2)) == (k, percent)
    ranks = [(interval_rank(rounds) or (0,))[0] for rounds in range(6, 23)]
    assert ranks == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5, 6, 6, 6]


def test_no_interval_below_six_rounds():
    assert [interval_rank(rounds) for rounds in range(-1, 6)] == [None] * 7


def test_coverage_of_the_interval_is_its_level():
    rng = random.Random(4)
    for rounds in range(6, 21):
        covered = 0
        level = None
        for _ in range(4000):
            seen = effect([math.exp(rng.gauss(0, NOISE)) for _ in range(rounds)], [1.0] * rounds)
            covered += seen.low <= 1 <= seen.high
            level = seen.level
        assert covered / 4000 == pytest.approx(level, abs=0.015), rounds


def test_interval_is_the_order_statistics_of_the_paired_ratios():
    ratios = [1.3, 0.9, 1.1, 1.0, 1.2, 0.8, 1.4, 1.5, 0.7]
    baseline = [0.1 * (i + 1) for i in range(9)]
    seen = effect([r * b for r, b in zip(ratios, baseline, strict=True)], baseline)
    assert seen.rounds == 9
    assert seen.ratios == pytest.approx(ratios)
    assert (seen.low, seen.ratio, seen.high) == pytest.approx((0.8, 1.1, 1.4))  # second, middle, eighth
    assert seen.level == pytest.approx(0.9609, abs=1e-4)


def test_fewer_than_six_rounds_give_the_range_and_no_level():
    seen = effect([1.1, 1.4, 1.2, 1.3], [1.0] * 4)
    assert (seen.low, seen.high) == pytest.approx((1.1, 1.4))
    assert seen.ratio == pytest.approx(math.sqrt(1.2 * 1.3))
    assert seen.level is None


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=1, max_size=25))
def test_exchanging_the_two_inverts_the_effect(pairs):
    there = effect([s for s, _ in pairs], [b for _, b in pairs])
    back = effect([b for _, b in pairs], [s for s, _ in pairs])
    assert there.low <= there.ratio * (1 + 1e-12)
    assert there.ratio <= there.high * (1 + 1e-12)
    inverted = (1 / there.high, 1 / there.ratio, 1 / there.low)
    assert (back.low, back.ratio, back.high) == pytest.approx(inverted)
    assert deviation(back) == pytest.approx(deviation(there))


@pytest.mark.parametrize(
    ("strategy", "baseline", "message"),
    [
        ([], [], "empty"),
        ([1.0], [1.0, 1.0], "complete rounds"),
        ([1.0, 0.0], [1.0, 1.0], "position 1"),
        ([1.0], [-1.0], "baseline"),
        ([math.nan], [1.0], "nan"),
        ([math.inf], [1.0], "inf"),
    ],
)
def test_bad_times_are_refused(strategy, baseline, message):
    with pytest.raises(ValueError, match=message):
        effect(strategy, baseline)


# verdicts


@pytest.mark.parametrize("rounds", [3, 4, 5, 6, 9, 12, 20])
def test_nothing_differs_and_few_verdicts_say_so(rounds):
    rng = random.Random(1)
    verdicts = [judged(rng, rounds, 1.0) for _ in range(40)]
    assert sum(v in ("faster", "slower") for v in verdicts) <= 5
    assert sum(v == "withheld" for v in verdicts) <= 8


def test_five_percent_is_found_and_half_a_percent_is_not_claimed():
    rng = random.Random(1)
    assert [judged(rng, 20, 1.05) for _ in range(10)].count("slower") >= 9
    assert {judged(rng, 20, 1.005) for _ in range(10)} <= {"same", "unresolved", "withheld"}


@pytest.mark.parametrize(
    ("rounds", "found", "half"),
    [
        (3, 0.50, None),
        (5, 0.32, None),
        (6, 0.59, 0.045),
        (9, 0.83, 0.033),
        (12, 0.93, 0.028),
        (20, 0.99, 0.021),
    ],
)
def test_power_and_width_are_the_published_ones(rounds, found, half):
    rng = random.Random(3)
    seen = [effect(medians(rng, rounds, 1.05), medians(rng, rounds)) for _ in range(1500)]
    assert sum(speed_verdict(e, MARGIN) == "slower" for e in seen) / 1500 == pytest.approx(found, abs=0.04)
    if half is not None:
        assert sum(map(half_width, seen)) / 1500 == pytest.approx(half, abs=0.0015)


def test_same_is_reached_when_noise_is_small():
    rng = random.Random(2)
    verdicts = [speed_verdict(effect(medians(rng, 12, 1, 0.005), [0.1] * 12), MARGIN) for _ in range(20)]
    assert verdicts.count("same") >= 18


@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_drift_of_ten_percent_cancels_within_rounds(members):
    names = ["baseline", "nothing", "checkpoint", "remat"][:members]
    for seed in range(20):
        times: dict[str, list[float]] = {name: [] for name in names}
        for r in range(20):
            for place, name in enumerate(shuffled(names, seed, r)):
                times[name].append(0.1 * (1 + 0.1 * (r * members + place) / (20 * members)))
        for name in names[1:]:
            assert deviation(effect(times[name], times["baseline"])) < 0.005
    # What the order protects from: all of one, then all of the other.
    drifting = [0.1 * (1 + 0.1 * i / 40) for i in range(40)]
    assert deviation(effect(drifting[20:], drifting[:20])) > 0.04


@pytest.mark.parametrize("rounds", [1, 2])
def test_one_or_two_rounds_never_resolve(rounds):
    for factor in (0.1, 1.0, 10.0):
        assert speed_verdict(effect([factor] * rounds, [1.0] * rounds), MARGIN) == "unresolved"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.03, 1.05, 1.021], "slower"),
        ([0.97, 0.90, 0.979], "faster"),
        ([1.03, 1.05, 1.019], "unresolved"),
        ([1.03, 1.05, 0.9, 1.04], "unresolved"),
        ([1.0, 1.0, 1.0, 1.0, 1.0], "unresolved"),  # five rounds never say "same"
    ],
)
def test_three_to_five_rounds_need_every_round_beyond_the_margin(ratios, verdict):
    assert speed_verdict(effect(ratios, [1.0] * len(ratios)), MARGIN) == verdict


@pytest.mark.parametrize(
    ("low", "ratio", "high", "verdict"),
    [
        (1.001, 1.03, 1.06, "slower"),
        (0.94, 0.97, 0.999, "faster"),
        (0.99, 1.03, 1.06, "unresolved"),  # includes 1
        (1.001, 1.015, 1.03, "unresolved"),  # excludes 1, too small to matter, not surely inside
        (1.001, 1.01, 1.019, "same"),
        (0.99, 1.0, 1.0201, "unresolved"),
        (0.9803, 1.0, 1.01, "unresolved"),  # just outside 1 / 1.02
    ],
)
def test_from_six_rounds_the_interval_decides(low, ratio, high, verdict):
    assert speed_verdict(Effect(6, ratio, low, high, 0.96875, (ratio,) * 6), MARGIN) == verdict


def test_control_gate_and_margin():
    def seen(low: float, ratio: float, high: float) -> Effect:
        return Effect(6, ratio, low, high, 0.96875, (ratio,) * 6)

    assert control_clean(seen(0.98, 1.0, 1.03))
    assert not control_clean(seen(1.001, 1.002, 1.003))
    assert not control_clean(seen(0.98, 0.99, 0.999))
    assert control_clean(effect([1.01, 1.05, 1.05], [1.0] * 3))
    assert not control_clean(effect([1.03, 1.05, 1.05], [1.0] * 3))
    assert control_clean(effect([1.03, 1.05, 1.05], [1.0] * 3), margin=0.04)
    assert control_clean(effect([1.5, 1.5], [1.0] * 2))  # no verdict follows from two rounds anyway
    assert group_margin(None) == MARGIN
    assert group_margin(seen(0.98, 1.01, 1.03)) == MARGIN
    assert group_margin(seen(0.98, 1.03, 1.08)) == pytest.approx(0.03)
    assert group_margin(seen(0.9, 1 / 1.03, 1.01)) == pytest.approx(0.03)
    assert speed_verdict(seen(1.01, 1.025, 1.04), group_margin(seen(0.98, 1.03, 1.08))) == "unresolved"


def test_half_width_is_half_the_interval():
    assert half_width(Effect(6, 1.0, 1 / 1.045, 1.045, 0.96875, ())) == pytest.approx(0.045)


def test_fastest_of_k_needs_enough_rounds():
    six, ten = (effect([0.9] * rounds, [1.0] * rounds) for rounds in (6, 10))
    assert sign_test(six) == pytest.approx(2**-5)
    assert holm([sign_test(six)]) == [True]
    assert holm([sign_test(six)] * 3) == [False] * 3
    assert holm([sign_test(ten)] * 3) == [True] * 3
    assert sign_test(effect([0.9, 1.1, 1.0], [1.0] * 3)) == 1.0
    assert sign_test(effect([0.9, 0.9, 0.9, 0.9, 0.9, 1.1], [1.0] * 6)) == pytest.approx(14 / 64)
    assert holm([0.04, 0.01, 0.03]) == [False, True, False]  # 0.03 x 2 stops it
    assert holm([0.024, 0.01, 0.04]) == [True, True, True]


# the pilot


def test_a_steady_pilot_needs_one_warm_up_step():
    assert pace([9.0] + [0.01] * 29) == Pacing(1, 100, ())


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


def test_no_steady_state_warms_up_as_long_as_fits():
    falling = [0.1 * 0.9**i for i in range(30)]
    assert pace(falling).warmup == 20
    assert pace(falling).flags == ("no_steady_state",)
    rising = [1.0 * 1.1**i for i in range(12)]
    middle = sorted(rising[1:])[5]
    assert pace(rising) == Pacing(math.floor(10 / middle), 10, ("no_steady_state",))


def test_a_short_pilot_says_so():
    assert pace([3.0, 2.0, 2.0, 2.0]) == Pacing(5, 10, ("short_pilot",))
    assert pace([8.0, 4.0, 4.0]) == Pacing(2, 7, ("short_pilot", "few_steps"))
    assert pace([60.0]) == Pacing(2, 3, ("short_pilot", "few_steps"))


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(1e-12, 10_000), (1e-5, 10_000), (0.003, 334), (0.1, 10), (0.5, 10), (3.0, 10), (3.1, 9), (40, 3)],
)
def test_timed_steps_fill_a_second_within_bounds(seconds, steps):
    chosen = pace([seconds] * 30)
    assert chosen == Pacing(1, steps, ("few_steps",) if steps < 10 else ())


def test_a_bad_pilot_is_refused():
    for pilot in ([], [1.0, 0.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="pilot"):
            pace(pilot)


# what the steps of one process say


def test_noisy_is_a_scatter_above_ten_percent():
    assert not noisy([1.0, 1.01, 1.02, 1.03])
    assert noisy([1.0, 1.2, 0.8, 1.1, 0.9])
    assert not noisy([*[1.0] * 20, 9.0])  # one outlier is not scatter
    assert not noisy([1.0])
    assert noisy([1.0, 1.0], involuntary_switches=101)
    assert not noisy([1.0, 1.0], involuntary_switches=100)


def test_unsynchronised_steps_are_seen():
    assert synchronised([0.1] * 10, 1.05)
    assert not synchronised([0.0005], 0.631)


def test_slope_ignores_spikes_and_sees_a_leak():
    rng = random.Random(0)
    leak = [1e6 + 4096 * i + (5e7 if i % 10 == 3 else 0) + rng.gauss(0, 500) for i in range(200)]
    assert slope(leak) == pytest.approx(4096, rel=0.02)
    flat = [1e6 + (5e7 if i in (3, 50) else 0) for i in range(100)]
    assert slope(flat) == 0
    assert slope([3.0 * i for i in range(10_000)]) == pytest.approx(3.0)
    assert slope([0, 5]) == 5


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan]])
def test_a_slope_needs_two_finite_values(values):
    with pytest.raises(ValueError, match="a slope needs"):
        slope(values)


# order


def test_order_repeats_for_a_seed_and_differs_between_rounds():
    names = ["baseline", "nothing", "checkpoint", "offload"]
    orders = [shuffled(names, 7, r) for r in range(200)]
    assert orders == [shuffled(names, 7, r) for r in range(200)]
    assert orders != [shuffled(names, 8, r) for r in range(200)]
    assert all(sorted(order) == sorted(names) for order in orders)
    first = [order[0] for order in orders]
    assert all(30 <= first.count(name) <= 70 for name in names)
    assert names == ["baseline", "nothing", "checkpoint", "offload"]


def run_elsewhere(code: str, **environment: str) -> str:
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_order_does_not_depend_on_the_process():
    code = "from harness.run.pacing import shuffled; print(shuffled(list('abcdefgh'), 3, 5))"
    seen = {run_elsewhere(code, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert seen == {f"{shuffled(list('abcdefgh'), 3, 5)}\n"}


def test_importing_it_loads_no_array_library():
    code = "import sys, harness.verdicts.effects; print({'numpy', 'torch', 'jax'} & set(sys.modules))"
    assert run_elsewhere(code) == "set()\n"
