"""What all pictures share: the library that draws them, their sizes, colours, and the plain values of a row."""

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
    "update": "#b279a2", "steady_step": "#4c78a8", "first_step": "#e0913c",
}  # fmt: skip
"""Colours of the phases."""
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
        raise PicturesError(f"pictures need the package {error.name}: pip install '.[pictures]'") from None
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


def short(label: str) -> str:
    """Return a label that fits beside a mark."""
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def titled(chart: Any, rows: Sequence[Figures], height: Any = HEIGHT) -> Any:
    """Give a chart its size, and the comparison it shows as its title."""
    return chart.properties(width=WIDTH, height=height, title=rows[0]["comparison"])


def apart(values: Sequence[float], least: float) -> list[float]:
    """Return positions near the values, in their order, that lie at least so far from each other."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    places = [values[at] for at in order]
    for _ in range(200):
        moved = False
        for at in range(1, len(places)):
            gap = least - (places[at] - places[at - 1])
            if gap > 1e-9:
                places[at - 1] -= gap / 2
                places[at] += gap / 2
                moved = True
        if not moved:
            break
    answers = [0.0] * len(values)
    for at, place in zip(order, places, strict=True):
        answers[at] = place
    return answers
