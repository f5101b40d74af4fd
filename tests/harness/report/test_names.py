"""Names at the edge of a picture: none over another, none outside, and where there is room each beside its own line."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.report.charts.names import apart


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60))
def test_names_lie_apart_within_the_picture_in_the_order_of_their_lines(values: list[float]) -> None:
    least = 10 / len(values)
    places = apart(values, least, 0, 10)
    ordered = [place for _, place in sorted(zip(values, places, strict=True))]
    assert all(after - before > least - 1e-9 for before, after in pairwise(ordered))
    assert min(places) > -1e-9 and max(places) < 10 + 1e-9


def test_a_name_that_has_room_stands_beside_its_line_and_neighbours_share_the_way() -> None:
    assert apart([5.0, 1.0, 8.0], 1.0, 0, 10) == [5.0, 1.0, 8.0]
    assert apart([5.0, 5.0], 1.0, 0, 10) == pytest.approx([4.5, 5.5])
    assert apart([0.0, 0.0, 9.0], 1.0, 0, 10) == pytest.approx([0.0, 1.0, 9.0])
