"""What the steps of one process say about it: scatter, a clock that was read too early, growth."""

import math
import random

import pytest

from harness.worker.steadiness import noisy, slope, synchronised


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
    assert synchronised([0.0035] * 4, 0.0181), "another program had the processor for 4 ms"
    assert not synchronised([0.0005] * 4, 0.0181)


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
