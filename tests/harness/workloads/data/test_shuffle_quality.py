"""The figures of a shuffle against what can be worked out by hand."""

import numpy as np
import pytest

from harness.workloads.data.shuffle_quality import coverage, quality


def permutation(count, seed=0):
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)


def test_the_sequential_order_is_zero_and_so_is_its_reverse():
    assert quality(np.arange(10_000)) == 0
    assert quality(np.arange(10_000)[::-1].astype(np.uint32)) == 0  # differences of unsigned numbers


@pytest.mark.parametrize("count", [5_000, 100_000, 379_971])
def test_a_permutation_is_about_one(count):
    assert quality(permutation(count)) == pytest.approx(1, abs=0.01)


def test_the_yardstick_is_the_mean_over_all_permutations():
    """For a small count the expected shares of the distances are those over every permutation there is."""
    from itertools import permutations

    distances = np.concatenate([np.abs(np.diff(order)) for order in permutations(range(5))])
    shares = np.bincount(distances)[1:] / len(distances)
    assert shares == pytest.approx([2 * (5 - d) / (5 * 4) for d in range(1, 5)])
    one = [0, 1, 3, 2, 4]  # distances 1, 2, 1, 2
    assert quality(one) == pytest.approx(np.log(2) / -(shares * np.log(shares)).sum())


def test_mixing_farther_scores_higher():
    count = 65_536
    scores = []
    for size in (16, 256, 4096, count):
        order = np.concatenate([start + permutation(size, start) for start in range(0, count, size)])
        scores.append(quality(order))
    assert scores == sorted(scores) and scores[0] < 0.1 < 0.9 < scores[-1]


def test_too_few_windows_have_nothing_to_shuffle():
    assert [quality(order) for order in ([], [0], [1, 0])] == [0, 0, 0]
    assert quality([2, 0, 1]) > 0


def test_coverage_counts_distinct_windows():
    assert coverage([0, 0, 3], 4) == 0.5
    assert coverage(permutation(100), 100) == 1
    assert coverage(np.array([], int), 10) == 0
