"""Quantiles of Student's t and of the largest of several t statistics that share a baseline.

Dunnett, A multiple comparison procedure for comparing several treatments with a control, JASA 50 (1955), 1096-1121.
"""

import math
from functools import lru_cache

_NODES = 6.0
"""How far out the integrals go, in standard deviations; beyond lies less than 2e-9."""
_STEP = 0.5
"""Between the points of the integrals, in standard deviations; a trapezoid sum of a normal density errs by 1e-34."""


def probability(bound: float, comparisons: int, correlation: float, degrees: int) -> float:
    """Return the probability that all of several t statistics lie within -bound to bound.

    Any two of them have this `correlation`, from 0 below 1, and all share one scale with `degrees` of freedom. Two
    trapezoid sums, over the shared part and over the scale: of smooth functions that vanish at both ends they are
    exact to about 1e-6 from 2 degrees on.
    """
    apart = math.sqrt((1 - correlation) * 2)
    lean = math.sqrt(correlation) / apart  # of the argument of erf, per unit of the shared part
    return sum(
        weight * share * ((math.erf(edge + lean * z) + math.erf(edge - lean * z)) / 2) ** comparisons
        for scale, weight in _scales(degrees)
        for edge in (bound * scale / apart,)
        for z, share in _normal(correlation > 0)
    )


@lru_cache(maxsize=4096)
def quantile(comparisons: int, correlation: float, degrees: int, error: float) -> float:
    """Return the bound that the largest of several t statistics passes, on either side, with probability `error`.

    With one comparison this is the two-sided quantile of Student's t. Raise ValueError for arguments without meaning.
    """
    if comparisons < 1 or degrees < 2 or not 0 <= correlation < 1 or not 0 < error < 1:
        raise ValueError(
            f"no quantile for {comparisons} comparisons, correlation {correlation}, {degrees} degrees of freedom and "
            f"error {error}: pass at least 1 and 2, a correlation from 0 and an error above 0, both below 1"
        )
    if comparisons == 1:
        correlation = 0.0
    below, above = 0.0, 4.0
    while 1 - probability(above, comparisons, correlation, degrees) > error:
        below, above = above, 2 * above
    # Regula falsi on the logarithm of the error, which is nearly straight; halving where one end stays (Illinois).
    low, high = (math.log(_beyond(x, comparisons, correlation, degrees) / error) for x in (below, above))
    for _ in range(60):
        middle = (below * high - above * low) / (high - low)
        value = math.log(_beyond(middle, comparisons, correlation, degrees) / error)
        if abs(value) < 1e-5:
            break
        if value > 0:
            below, low, high = middle, value, high / 2
        else:
            above, high, low = middle, value, low / 2
    return middle


def _beyond(bound: float, comparisons: int, correlation: float, degrees: int) -> float:
    return max(1 - probability(bound, comparisons, correlation, degrees), 1e-12)


@lru_cache(maxsize=4)
def _normal(correlated: bool) -> tuple[tuple[float, float], ...]:
    """Return points and weights for half of a normal variable; the sum is even in it."""
    if not correlated:
        return ((0.0, 1.0),)
    points = [i * _STEP for i in range(int(_NODES / _STEP) + 1)]
    weights = [math.exp(-z * z / 2) * (1 if z else 0.5) for z in points]
    return tuple((z, weight / sum(weights)) for z, weight in zip(points, weights, strict=True))


@lru_cache(maxsize=512)
def _scales(degrees: int) -> tuple[tuple[float, float], ...]:
    """Return points and weights for the root of chi-squared over its degrees of freedom, taken on the ln scale."""
    width = 1 / math.sqrt(2 * degrees)
    step = _STEP * width
    lowest = max(1.5 * _NODES, 50 * width)  # below, the density falls only as the power `degrees` of the scale
    points = [i * step for i in range(-int(lowest / _STEP), int(_NODES / _STEP) + 1)]
    weights = [math.exp(degrees * (u - (math.exp(2 * u) - 1) / 2)) for u in points]
    return tuple((math.exp(u), weight / sum(weights)) for u, weight in zip(points, weights, strict=True))
