"""Where the names of lines stand at the edge of a picture: each near the end of its line, and none over another."""

import math
from collections.abc import Sequence

from harness.report.charts.style import HEIGHT

LINE = 13
"""Pixels from one name to the next."""


def height_of(count: int) -> int:
    """Return the height of a picture with so many names, in pixels."""
    return max(HEIGHT, LINE * (count + 3))


def at_edge(ends: Sequence[float], domain: Sequence[float], height: int) -> list[float]:
    """Return a place for the name of each end, in their order, on an axis of logarithms that is so many pixels high."""
    low, high = map(math.log, domain)
    return [
        math.exp(place) for place in apart([math.log(end) for end in ends], LINE / height * (high - low), low, high)
    ]


def apart(values: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Return positions in the order of the values, at least `least` apart, between two ends, as near as can be.

    By isotonic regression: what is left of a value after the names below it may not fall, and neighbours that would
    share their mean.
    """
    order = sorted(range(len(values)), key=lambda at: values[at])
    groups: list[list[float]] = []
    for below, at in enumerate(order):
        groups.append([values[at] - below * least])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    most = high - least * (len(values) - 1)
    levels = [max(low, min(most, _mean(group))) for group in groups for _ in group]
    places = {at: level + below * least for below, (at, level) in enumerate(zip(order, levels, strict=True))}
    return [places[at] for at in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
