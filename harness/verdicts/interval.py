"""An interval of positive figures or of ratios, and how two of them compare."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """All values from `low` to `high`, both included; `high` may be infinite. Raise ValueError if they are reversed.

    `<` and `>` hold only where every pair of values does: of two intervals that overlap neither is below the other.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"an interval from {self.low!r} to {self.high!r} holds nothing: put the lower bound first")

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __lt__(self, other: "Interval | float") -> bool:
        return self.high < _ends(other)[0]

    def __gt__(self, other: "Interval | float") -> bool:
        return self.low > _ends(other)[1]

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
