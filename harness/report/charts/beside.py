"""Where the names of points stand in a picture: each beside its point, where it covers least of what is there."""

from collections.abc import Sequence
from typing import NamedTuple

from harness.report.charts.style import HEIGHT, WIDTH

LETTER, LINE = 6.2, 13.0
"""The width of a letter and the height of a line of a name, in pixels."""
APART = 8.0
"""How far a name stands from its point, in pixels."""
LINES_AWAY = (0.6, -0.6, 0.0, 1.6, -1.6, 2.6, -2.6, 3.6)
"""How many lines above its point a name may stand; the first is best."""
OUTSIDE = 100
"""How much worse it is to leave the picture than to cover another name."""
FARTHER = 5
"""Square pixels that a name rather covers than to take the next of its places."""


class Box(NamedTuple):
    """A part of the picture, in pixels from its lower left corner."""

    left: float
    right: float
    low: float
    high: float

    @property
    def area(self) -> float:
        """Square pixels."""
        return max(0.0, self.right - self.left) * max(0.0, self.high - self.low)

    def common(self, other: "Box") -> "Box":
        """Return what two boxes have in common."""
        return Box(
            max(self.left, other.left),
            min(self.right, other.right),
            max(self.low, other.low),
            min(self.high, other.high),
        )


INSIDE = Box(0, WIDTH, 0, HEIGHT)


class Name(NamedTuple):
    """Where a name stands: its box, and whether it begins or ends (`left`, `right`) beside its point."""

    box: Box
    align: str


def beside(points: Sequence[tuple[float, float, str]], boxes: Sequence[Box]) -> list[Name]:
    """Return where the names of points (x, y, name) stand, in their order; `boxes` are what is in the picture."""
    others = list(boxes)
    names = []
    for x, y, text in points:
        places = [_name(x, y, text, align, lines) for lines in LINES_AWAY for align in ("left", "right")]
        at = min(range(len(places)), key=lambda at: _covered(places[at].box, others) + FARTHER * at)
        others.append(places[at].box)
        names.append(places[at])
    return names


def _name(x: float, y: float, text: str, align: str, lines: float) -> Name:
    width, middle = LETTER * len(text), y + lines * LINE
    left = x + APART if align == "left" else x - APART - width
    return Name(Box(left, left + width, middle - LINE / 2, middle + LINE / 2), align)


def _covered(name: Box, others: Sequence[Box]) -> float:
    """Return how many square pixels of others a name covers; what is outside of the picture counts many times."""
    outside = name.area - name.common(INSIDE).area
    return OUTSIDE * outside + sum(name.common(other).area for other in others)
