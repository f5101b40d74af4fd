import math
import random
import sys
import time
from statistics import fmean
from subprocess import run

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.verdicts import dunnett
from harness.verdicts.interval import Interval
from harness.verdicts.pooled import BASELINES, FINAL, Speed, pooled, word_of
from harness.verdicts.pooled import _fit as fit

NAMES = (*BASELINES, "checkpoint", "remat", "offload")


def group(rounds: int, scatter: float = 0.02, seed: int = 0, names=NAMES, **ratios: float) -> dict[str, dict]:
    rng = random.Random(seed)
    return {
        name: {r: 0.2 * ratios.get(name, 1.0) * math.exp(rng.gauss(0, scatter)) for r in range(rounds)}
        for name in names
    }


# the model


def test_a_drift_between_rounds_changes_nothing():
    times = group(6)
    drifting = {name: {r: s * 3.0**r for r, s in each.items()} for name, each in times.items()}
    for name, speed in pooled(times).speeds.items():
        drifted = pooled(drifting).speeds[name]
        assert (drifted.low, drifted.ratio, drifted.high) == pytest.approx((speed.low, speed.ratio, speed.high))


def test_clean_times_are_judged_as_least_squares_would():
    times = group(5, 0.001)
    logs = numpy.log([list(each.values()) for each in times.values()])
    means = logs.mean(1)
    left = logs - means[:, None] - logs.mean(0) + logs.mean()
    scale = math.sqrt((left**2).sum() / 16)
    seen = pooled(times)
    assert seen.degrees == 16
    assert seen.scatter == pytest.approx(scale, rel=0.35)
    for place, name in enumerate(NAMES[2:], start=2):
        assert math.log(seen.speeds[name].ratio) == pytest.approx(means[place] - means[:2].mean(), abs=scale / 2)
        error = seen.speeds[name].standard_error
        assert error == pytest.approx(seen.scatter * (1 + 0.2 / 5) * math.sqrt(1.5 / 5), rel=1e-2)
        bound = dunnett.quantile(3, 0.32, 16, 0.05)  # correlation 1/3, rounded down
        assert seen.speeds[name].high == pytest.approx(seen.speeds[name].ratio * math.exp(bound * error), rel=1e-6)


def test_the_interval_of_one_ratio_is_students():
    speed = pooled(group(6)).speeds["checkpoint"]
    half = dunnett.quantile(1, 0.0, speed.degrees, 0.01) * speed.standard_error
    seen = speed.interval_at(0.01)
    assert (math.log(seen.high / speed.ratio), math.log(speed.ratio / seen.low)) == pytest.approx((half, half))
    assert pooled({"baseline": {0: 1.0}, "a": {0: 1.0}}).speeds["a"].interval_at(0.05) is None


def incomplete(seed: int) -> dict[str, dict]:
    """Return 8 members in blocks of three or four with the baseline, some processes lost."""
    rng = random.Random(seed)
    times: dict[str, dict] = {name: {} for name in (*BASELINES, *"abcdef")}
    for number in range(5):
        others = [name for name in times if name != "baseline"]
        rng.shuffle(others)
        for block, members in enumerate((others[:3], others[3:])):
            level = math.exp(rng.gauss(0, 0.3))
            for name in ("baseline", *members):
                if rng.random() < 0.9:
                    times[name][number, block] = level * math.exp(rng.gauss(0, 0.01))
    return {name: each for name, each in times.items() if each}


@pytest.mark.parametrize("seed", range(6))
def test_incomplete_designs_have_the_exact_covariance_and_degrees(seed):
    times = incomplete(seed)
    model = fit(times)
    rounds = list({r: None for each in times.values() for r in each})
    cells = [(m, r) for m, each in times.items() for r in each]
    design = numpy.zeros((len(cells), len(times) + len(rounds)))
    for i, (member, number) in enumerate(cells):
        design[i, list(times).index(member)] = design[i, len(times) + rounds.index(number)] = 1
    assert model.degrees == len(cells) - numpy.linalg.matrix_rank(design)
    exact = numpy.linalg.pinv(design.T @ design)[: len(times), : len(times)]
    names = list(times)
    contrasts = [{"a": 1.0, "baseline": -0.5, "nothing": -0.5}, {"b": 1.0, "baseline": -1.0}]
    vectors = [numpy.array([c.get(name, 0.0) for name in names]) for c in contrasts]
    for i in range(2):
        for j in range(2):
            assert model.covariance(contrasts[i], contrasts[j]) == pytest.approx(vectors[i] @ exact @ vectors[j])


def test_the_fit_solves_hubers_equations():
    times = incomplete(3)
    times["c"][next(iter(times["c"]))] *= 2  # one process twice as slow
    model = fit(times)
    # Least absolute influence: at the solution the cut-off residuals of each member and round add to nothing.
    whole = {(m, r): math.log(s) - model.means[m] for m, each in times.items() for r, s in each.items()}
    cut = 1.5 * model.scale
    residuals = {}
    for number in {r for _, r in whole}:
        inside = {key: value for key, value in whole.items() if key[1] == number}
        low, high = min(inside.values()), max(inside.values())
        for _ in range(80):
            middle = (low + high) / 2
            pull = sum(min(cut, max(-cut, value - middle)) for value in inside.values())
            low, high = (middle, high) if pull > 0 else (low, middle)
        residuals |= {key: value - middle for key, value in inside.items()}
    for member in times:
        pulls = [min(cut, max(-cut, value)) for (m, _), value in residuals.items() if m == member]
        assert abs(sum(pulls)) < 0.02 * cut


def test_a_stray_process_moves_its_member_little():
    times = group(8, 0.01, offload=1.1)
    times["remat"][3] *= 3
    seen = pooled(times).speeds
    assert seen["remat"].word == "within 5 %"
    assert seen["offload"].word == "slower"


def test_a_baseline_that_ended_early_weighs_as_its_processes_do():
    times = group(6, 0.001)
    times["baseline"] = {0: 1.3 * times["baseline"][0]}
    for speed in pooled(times).speeds.values():
        assert speed.ratio == pytest.approx(1.3 ** (-1 / 7), rel=0.01)  # one of the seven processes of both baselines


def test_both_baselines_are_the_mark():
    values = zip(NAMES, (1.0, 1.21, 1.1, 2.2, 1.1), strict=True)
    times = {name: dict.fromkeys(range(4), seconds) for name, seconds in values}
    seen = pooled(times)
    assert [seen.speeds[name].ratio for name in NAMES[2:]] == pytest.approx([1.0, 2.0, 1.0])
    assert seen.control.ratio == pytest.approx(1.21)
    assert pooled(times, ("baseline",)).speeds["checkpoint"].ratio == pytest.approx(1.1)
    assert set(pooled(times, ("baseline",)).speeds) == {"nothing", *NAMES[2:]}


def test_equal_times_have_no_scatter():
    seen = pooled({name: dict.fromkeys(range(3), 0.25) for name in NAMES})
    assert seen.scatter == pytest.approx(0)
    assert {speed.word for speed in seen.speeds.values()} == {"within 5 %"}


# groups that lack something


def test_below_three_degrees_of_freedom_nothing_is_inferred():
    """Four members have as many in two rounds, three in three, and two in four."""
    pair = ("baseline", "remat")
    for times in (group(1), group(2, names=NAMES[:3], checkpoint=3.0), group(3, names=pair, remat=3)):
        for name, speed in pooled(times).speeds.items():
            assert (speed.word, speed.standard_error, speed.more_rounds) == ("open", None, None)
            assert speed.rounds == len(times[name])
    ranged = pooled({"baseline": {0: 1.0, 1: 2.0}, "remat": {0: 1.5, 1: 2.2, 2: 9.0}}).speeds["remat"]
    assert (ranged.low, ranged.high) == pytest.approx((1.1, 1.5))  # round 2 has no baseline
    assert ranged.ratio == pytest.approx(math.sqrt(1.1 * 1.5))


@pytest.mark.parametrize(("names", "rounds"), [(("baseline", "remat"), 4), (("baseline", "nothing", "remat"), 3)])
def test_one_strategy_alone_has_an_interval_after_a_few_rounds(names, rounds):
    speed = pooled(group(rounds, names=names, remat=1.5)).speeds["remat"]
    assert speed.word == "slower" and speed.standard_error is not None and 1.5 in speed.interval


def test_no_baseline_or_no_row_is_no_speed():
    assert pooled({}).speeds == {}
    assert pooled({"remat": {0: 1.0}}).speeds == {}
    assert pooled({"baseline": {}, "remat": {0: 1.0}}).speeds == {}
    assert pooled({"baseline": {0: 1.0}}).speeds == {}
    only = pooled({"baseline": {0: 1.0}, "nothing": {0: 1.1}})
    assert only.speeds == {}
    assert only.control.ratio == pytest.approx(1.1)


def test_a_baseline_that_dies_halfway_still_joins_all_rounds():
    times = group(8, 0.01, remat=1.2)
    times["baseline"] = {r: s for r, s in times["baseline"].items() if r < 3}
    times["nothing"] = {r: s for r, s in times["nothing"].items() if r < 5}
    seen = pooled(times)
    assert seen.speeds["remat"].word == "slower"
    assert seen.degrees == 3 + 5 + 3 * 8 - 5 - 8 + 1
    whole = pooled(group(8, 0.01, remat=1.2)).speeds["remat"]
    assert seen.speeds["remat"].standard_error > whole.standard_error


def test_the_control_alone_is_a_baseline_too():
    times = group(6, 0.01, remat=1.2)
    del times["baseline"]
    seen = pooled(times)
    assert seen.speeds["remat"].word == "slower"
    assert seen.control is None


def test_a_member_that_shares_no_round_has_a_range():
    times = group(4, 0.01, remat=1.2)
    times["offload"] = {10: 0.5, 11: 0.6}
    seen = pooled(times).speeds
    assert seen["remat"].word == "slower"
    assert (seen["offload"].word, seen["offload"].standard_error) == ("open", None)


def test_a_member_with_one_process_is_judged_widely():
    times = group(6, 0.01)
    times["offload"] = {2: times["offload"][2]}
    seen = pooled(times).speeds
    assert seen["offload"].half_width > 1.7 * seen["remat"].half_width


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9, 1e-12])
def test_times_that_no_step_can_take_are_refused(seconds):
    times = group(3)
    times["remat"][1] = seconds
    with pytest.raises(ValueError, match=r"'remat' has a step time of .* in round 1"):
        pooled(times)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from((*NAMES, "a", "b")),
        st.dictionaries(st.integers(0, 4), st.floats(1e-6, 1e4), max_size=5),
    )
)
def test_whatever_is_there_is_judged(times):
    seen = pooled(times)
    rows = [name for name, each in times.items() if each and name not in BASELINES]
    assert list(seen.speeds) == (rows if any(times.get(name) for name in BASELINES) else [])
    for speed in seen.speeds.values():
        assert speed.low <= speed.ratio * (1 + 1e-9)
        assert speed.ratio <= speed.high * (1 + 1e-9)


# words


@pytest.mark.parametrize(
    ("low", "ratio", "high", "word"),
    [
        (1.001, 1.03, 1.06, "slower"),
        (1.001, 1.03, 1.04, "slower"),
        (0.94, 0.97, 0.999, "faster"),
        (1.001, 1.015, 1.06, "at most 5 % faster"),  # not 1, but too near to it
        (0.96, 1.0, 1.04, "within 5 %"),
        (0.9, 0.97, 1.04, "at most 5 % slower"),
        (0.96, 1.03, 1.2, "at most 5 % faster"),
        (0.95, 1.03, 1.2, "open"),
        (0.94, 1.0, 1.06, "open"),
        (0.953, 1.0, 1.05, "at most 5 % faster"),  # the bound itself is not below it
        (0.95, 1.0, 1.05, "open"),
        (1.0, 1.05, 1.1, "at most 5 % faster"),
    ],
)
def test_words(low, ratio, high, word):
    assert word_of(ratio, Interval(low, high)) == word


@given(st.floats(-0.3, 0.3), st.floats(0, 0.3), st.floats(0, 0.3))
def test_a_word_never_says_more_than_its_interval(estimate, below, above):
    seen = Interval(math.exp(estimate - below), math.exp(estimate + above))
    word = word_of(math.exp(estimate), seen)
    assert {
        "slower": seen.low > 1,
        "faster": seen.high < 1,
        "within 5 %": seen.low > 1 / 1.05 and seen.high < 1.05,
        "at most 5 % slower": seen.high < 1.05,
        "at most 5 % faster": seen.low > 1 / 1.05,
        "open": True,
    }[word]


def test_more_rounds_are_about_right():
    few = group(4, 0.04, seed=5, names=(*NAMES, *"abcde"), remat=1.08)
    speed = pooled(few).speeds["remat"]
    assert speed.word not in FINAL
    assert 1 <= speed.more_rounds <= 20
    more = group(4 + speed.more_rounds, 0.04, seed=5, names=(*NAMES, *"abcde"), remat=1.08)
    assert pooled(more).speeds["remat"].word == "slower"
    assert pooled(group(4, 0.5)).speeds["remat"].more_rounds is None


# cost


def test_seventy_groups_take_less_than_a_second(slowness):
    groups = [group(3 + i % 6, seed=i, names=(*NAMES, *"abcdefgh"[: i % 9])) for i in range(70)]
    dunnett.quantile.cache_clear()
    start = time.thread_time()
    for each in groups:
        pooled(each)
    assert time.thread_time() - start < slowness


def test_importing_it_loads_no_array_library():
    code = (
        "import sys, harness.verdicts.looks, harness.verdicts.blocks;"
        "print({'numpy', 'scipy', 'torch', 'jax'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    assert run(command, capture_output=True, text=True, check=True).stdout == "set()\n"


# two runs


def test_the_change_between_two_runs_has_the_errors_of_both():
    old, new = (
        Speed(ratio, Interval(ratio, ratio), "open", 6, None, error, degrees)
        for ratio, error, degrees in ((1.25, 0.03, 20), (1.5, 0.04, 10))
    )
    half = 2.22814 * 0.05  # Student's t of the fewer degrees, and the root of 0.03 squared and 0.04 squared
    seen = new.change_since(old, 0.05)
    assert (math.log(seen.low / 1.2), math.log(seen.high / 1.2)) == pytest.approx((-half, half), abs=1e-4)
    once = Speed(1.0, Interval(1.0, 1.0), "open", 1)
    assert new.change_since(once, 0.05) is None and once.change_since(new, 0.05) is None


def test_what_may_be_faster_is_decided_once_it_is_surely_not_slower():
    rng = random.Random(1)
    times = {name: {number: rng.uniform(0.9, 1.1) for number in range(6)} for name in ("baseline", "nothing", "other")}
    times["remat"] = {number: 0.96 * rng.uniform(0.9, 1.1) for number in range(6)}
    speed = pooled(times).speeds["remat"]
    assert speed.word == "open" and speed.ratio < 1
    narrower = math.log(speed.high / speed.ratio) / math.log(1.05 / speed.ratio)
    assert speed.more_rounds == max(1, math.ceil(6 * narrower**2 - 6)) < 10


# members of which one is less steady


def with_one_less_steady(rng: random.Random, unsteady: str, times: float) -> dict[str, dict[int, float]]:
    """Eight equal members in eight rounds, one of which scatters so many times as much as the 3 % of the others."""
    names = ("baseline", "nothing", *(f"row {at}" for at in range(6)))
    return {
        name: {number: math.exp(rng.gauss(0, 0.03 * (times if name == unsteady else 1))) for number in range(8)}
        for name in names
    }


def covered(unsteady: str, times: float) -> float:
    rng = random.Random(1)
    judged = [pooled(with_one_less_steady(rng, unsteady, times)).speeds.values() for _ in range(150)]
    return fmean(all(1 in speed.interval for speed in each) for each in judged)


@pytest.mark.parametrize("unsteady", ["row 0", "baseline"])
@pytest.mark.parametrize("times", [1, 3])
def test_intervals_hold_where_one_member_is_less_steady(unsteady, times):
    assert covered(unsteady, times) >= 0.92


def test_they_would_not_with_one_scatter_for_all(monkeypatch):
    monkeypatch.setattr("harness.verdicts.pooled._UNSTEADY", math.inf)
    assert covered("row 0", 3) < 0.85


def test_one_stray_process_makes_no_member_unsteady(monkeypatch):
    times = with_one_less_steady(random.Random(5), "", 1)
    times["row 0"][3] *= 1.5
    error = pooled(times).speeds["row 0"].standard_error
    monkeypatch.setattr("harness.verdicts.pooled._UNSTEADY", math.inf)
    assert error == pooled(times).speeds["row 0"].standard_error
