import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.verdicts.interval import Interval

positive = st.floats(1e-3, 1e3)
intervals = st.tuples(positive, positive).map(lambda ends: Interval(min(ends), max(ends)))


@given(intervals, intervals)
def test_of_two_intervals_one_is_below_or_they_overlap(first, second):
    overlap = first.low <= second.high and second.low <= first.high
    assert (first < second) + (first > second) + overlap == 1
    assert (first < second) == (second > first)


def test_values_bounds_and_width():
    seen = Interval(0.9, 1.2)
    assert 0.9 in seen
    assert 1.21 not in seen
    assert seen < 1.3
    assert not seen < 1.2
    assert seen > 0.8
    assert seen.inside(0.8, 1.3)
    assert not seen.inside(0.9, 1.3)
    assert Interval(1 / 1.04, 1.04).half_width == pytest.approx(0.04)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="holds nothing"):
        Interval(2.0, 1.0)
    with pytest.raises(ValueError, match="holds nothing"):
        Interval(math.nan, 1.0)
    with pytest.raises(ValueError, match="half-width"):
        _ = Interval(0.0, 1.0).half_width
