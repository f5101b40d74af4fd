"""An interval of positive figures or of ratios, and its arithmetic."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """All values from `low` to `high`, both included; `high` may be infinite. Raise ValueError if they are reversed.

    A product or quotient holds every product or quotient of a value of one side with a value of the other. `<` and
    `>` hold only where every pair of values does: of two intervals that overlap neither is below the other.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"an interval from {self.low!r} to {self.high!r} holds nothing: put the lower bound first")

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __mul__(self, other: "Interval | float") -> "Interval":
        corners = [0.0 if 0 in (x, y) else x * y for x in _ends(self) for y in _ends(other)]
        return Interval(min(corners), max(corners))

    __rmul__ = __mul__

    def __truediv__(self, other: "Interval | float") -> "Interval":
        low, high = _ends(other)
        if low <= 0 <= high:
            raise ValueError(f"cannot divide by an interval from {low!r} to {high!r}: it may be zero")
        return self * Interval(1 / high, 1 / low)

    def __lt__(self, other: "Interval | float") -> bool:
        return self.high < _ends(other)[0]

    def __gt__(self, other: "Interval | float") -> bool:
        return self.low > _ends(other)[1]

    def overlaps(self, other: "Interval") -> bool:
        """Return whether some value lies in both."""
        return self.low <= other.high and other.low <= self.high

    def inside(self, low: float, high: float) -> bool:
        """Return whether all values lie between two bounds, neither bound included."""
        return low < self.low and self.high < high

    @property
    def half_width(self) -> float:
        """Half the width on the ln scale, as a fraction of the middle: the h of +-h %; for positive values."""
        if self.low <= 0:
            raise ValueError(f"an interval from {self.low!r} has no half-width in percent: its values must be positive")
        return math.sqrt(self.high / self.low) - 1


def _ends(value: "Interval | float") -> tuple[float, float]:
    return (value.low, value.high) if isinstance(value, Interval) else (value, value)
