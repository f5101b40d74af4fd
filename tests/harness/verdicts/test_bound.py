"""A bound covers what it says: a new case of the kind, with the stated probability, whatever the errors are like."""

import random

import pytest

from harness.verdicts.bound import COVERAGE, ENOUGH, FEWEST, Kind, Residual, alike, at_most, bound, committed

CPU = Kind("torch/cpu", several=False, data=False, lower=False, attention=False)
RANKS = CPU._replace(several=True)
MIB = 1 << 20


def residuals(draw: random.Random, count: int, kind: Kind = CPU) -> list[Residual]:
    """Make residuals with long tails on both sides, at sizes of all magnitudes."""
    made = []
    for _ in range(count):
        predicted = int(10 ** draw.uniform(7, 10))
        made.append(Residual(kind, predicted, int(predicted * (1 + draw.choice((-1, 1)) * draw.expovariate(50)))))
    return made


@pytest.mark.parametrize("count", [39, 99, 199])
def test_new_cases_stay_within_the_bound_as_often_as_it_says(count: int) -> None:
    draw, within, stated = random.Random(7), 0, 0.0
    for _ in range(400):
        *known, new = residuals(draw, count + 1)
        limit = bound(new.predicted_bytes, known)
        assert limit is not None
        within += new.measured_bytes <= limit.peak_bytes
        stated = limit.coverage
    assert stated == pytest.approx(min(COVERAGE, count / (count + 1)), abs=0.001)
    assert within / 400 >= stated - 3 * (stated * (1 - stated) / 400) ** 0.5


def test_few_residuals_promise_less_and_none_promise_nothing() -> None:
    limits = [bound(MIB, residuals(random.Random(1), count)) for count in (19, ENOUGH, 199)]
    assert [limit.coverage for limit in limits if limit is not None] == [0.95, 0.99, COVERAGE]
    assert bound(MIB, []) is None


@pytest.mark.parametrize(("count", "above"), [(ENOUGH, 0), (198, 0), (399, 1)])
def test_the_largest_residual_bounds_until_there_are_enough_to_leave_it_out(count: int, above: int) -> None:
    rising = [Residual(CPU, 128 * MIB, 128 * MIB + each) for each in range(1, count + 1)]
    limit = bound(128 * MIB, rising)
    assert limit is not None and sum(each.measured_bytes > limit.peak_bytes for each in rising) == above


def test_a_bound_is_never_below_its_prediction() -> None:
    too_high = [Residual(CPU, 200 * MIB, 100 * MIB)] * FEWEST
    limit = bound(300 * MIB, too_high)
    assert limit is not None and limit.peak_bytes == 300 * MIB


def test_kinds_with_few_residuals_are_bounded_by_coarser_ones_too() -> None:
    draw = random.Random(3)
    single, ranks = residuals(draw, FEWEST), residuals(draw, FEWEST, RANKS)
    assert list(alike(CPU._replace(lower=True), single)) == [single], "of lower precision there are none"
    assert list(alike(RANKS, single + ranks[1:])) == [single + ranks[1:]], "of several ranks too few: all of the place"
    assert list(alike(RANKS, single + ranks)) == [ranks, single + ranks], "both, as neither has enough"
    enough = residuals(draw, ENOUGH, RANKS)
    assert list(alike(RANKS, single + enough)) == [enough]
    assert list(alike(Kind("jax/cpu", False, False, False, False), single)) == []


def test_the_larger_of_the_bounds_counts_with_the_coverage_of_the_coarsest() -> None:
    exact, short = [Residual(RANKS, 128 * MIB, 128 * MIB)] * FEWEST, [Residual(CPU, 128 * MIB, 256 * MIB)] * ENOUGH
    assert at_most(RANKS, 128 * MIB, exact + short) == (256 * MIB, bound(MIB, exact + short).coverage)  # type: ignore[union-attr]
    assert at_most(CPU, 128 * MIB, exact + short) == (256 * MIB, bound(MIB, short).coverage)  # type: ignore[union-attr]
    assert at_most(RANKS, 128 * MIB, exact) == (128 * MIB, FEWEST / (FEWEST + 1))


def test_several_ranks_are_not_bounded_by_runs_on_one() -> None:
    single = residuals(random.Random(5), ENOUGH)
    elsewhere = residuals(random.Random(6), ENOUGH, RANKS._replace(place="jax/cpu"))
    assert at_most(RANKS, 512 * MIB, single + elsewhere) is None, "of several ranks nothing was measured at this place"
    assert at_most(CPU, 512 * MIB, single + elsewhere) is not None
    assert at_most(RANKS, 512 * MIB, single + residuals(random.Random(7), 1, RANKS)) is not None


def test_the_committed_residuals_bound_what_they_are_about() -> None:
    known = committed()
    assert len(known) > FEWEST and all(each.predicted_bytes > 0 and each.measured_bytes > 0 for each in known)
    limit = at_most(CPU, 512 * MIB)
    assert limit is not None and 512 * MIB <= limit.peak_bytes < 640 * MIB
    assert at_most(RANKS._replace(place="torch/cuda"), 512 * MIB) is None, "nothing was measured on several GPUs"
