"""What all pictures share: the library that draws them, their sizes, colours, and the plain values of a row."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from harness.records.record import EXACT
from harness.refusal import Refusal
from harness.report.export import Figures

MIB = 1 << 20
WIDTH, HEIGHT = 640, 320
GREY, RED, GREEN, BLUE = "#8a8a93", "#c0392b", "#2a9753", "#3465a4"
LINES = ("#3465a4", "#d9822b", "#2a9753", "#a83f8f", "#c0392b", "#6b5b95", "#13868a", "#8a6d3b", "#5d6d7e", "#b5651d")
"""Colours of lines, one a strategy, that can be told apart on white and on black."""
PARTS: Mapping[str, str] = {
    "before the step": "#9aa5b1", "init": "#9aa5b1", "forward": "#4c78a8", "loss": "#e0913c", "backward": "#59a14f",
    "update": "#b279a2", "steady_step": "#4c78a8", "first_step": "#e0913c", "child processes": "#d4a6c8",
}  # fmt: skip
"""Colours of the phases."""
LINE_OF_TITLE = 72
"""Letters of a line of a title."""
LEAST_GAP = 1 / 12
"""How far apart the figures of an axis are at least, as a share of it."""
SETTINGS: Mapping[str, Any] = {
    "font": "Arial, 'Liberation Sans', Helvetica, sans-serif",
    "padding": {"left": 60, "right": 40, "top": 5, "bottom": 5},
    "title": {"anchor": "start"},
    "legend": {"labelLimit": 300, "columnPadding": 30},
    "axisY": {"labelLimit": 400},
}
"""How a picture in a file is set: in the letters it was measured with, and with room for wider ones."""
LONGEST = 46
"""Letters of a label that are shown; the rest stands in the table."""


class PicturesError(Refusal):
    """Pictures that cannot be made, in one sentence."""


def altair() -> Any:
    """Import altair, or raise PicturesError."""
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise PicturesError(f"pictures need the package {error.name}: install it, or the extra 'pictures'") from None
    return altair


def plain(row: Figures) -> Figures:
    """Return what a chart needs of a row, bytes as MiB, and whether its answer is the baseline's."""
    names = ("strategy", "status", "verdict", "answer", "peak_ratio", "time_ratio", "time_ratio_low", "time_ratio_high")
    sizes = {
        f"{name}_mib": row[f"{name}_bytes"] and row[f"{name}_bytes"] / MIB for name in ("peak", "predicted", "budget")
    }
    return (
        {name: row[name] for name in names} | sizes | {"exact": row["answer"] in EXACT, "label": short(row["strategy"])}
    )


def tooltip(*fields: str) -> list[Any]:
    """Return what is shown beside the pointer.

    Altair takes plain names too, in this and all channels, and spends more time on their meaning than on the rest.
    """
    return [altair().Tooltip(field) for field in fields]


def short(label: str) -> str:
    """Return a label that fits beside a mark."""
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def titled(chart: Any, rows: Sequence[Figures], height: Any = HEIGHT) -> Any:
    """Give a chart its size, and the comparison it shows as its title."""
    return chart.properties(width=WIDTH, height=height, title=textwrap.wrap(rows[0]["comparison"], LINE_OF_TITLE))


def logarithmic(low: float, high: float) -> tuple[Any, Any]:
    """Return the scale and the axis of ratios between two ends, with as many round figures as can be read."""
    alt = altair()
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    return scale, alt.Axis(values=ticks(low, high), format="~r", labelOverlap=False)


def ticks(low: float, high: float) -> list[float]:
    """Return round figures between two positive ends, the roundest first chosen, that do not crowd their axis."""
    least = LEAST_GAP * math.log(high / low)
    chosen: list[float] = []
    exponent = math.floor(math.log10(high))
    for step in (digit * 10.0**power for power in itertools.count(exponent, -1) for digit in (5, 2, 1)):
        if step < least * low:
            return sorted(chosen)
        for number in range(math.ceil(low / step), math.floor(high / step) + 1):
            if all(abs(math.log(number * step / other)) >= least for other in chosen):
                chosen.append(number * step)
    raise AssertionError("steps grow smaller without end")
