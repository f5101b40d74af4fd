"""What a case takes at most: its prediction, and what predictions of its kind were short by when they were measured.

Split conformal prediction (Vovk et al., 2005; scaled as by Lei et al., 2018): of n residuals of one kind, a new one
lies below the k-th smallest with a probability of k / (n + 1), whatever their distribution, as long as they are
exchangeable. A kind of few cases is not known well by them alone: of its bound and those of the kinds that it is part
of, the largest counts. The residuals are those of the committed results and, on a GPU, of training runs that others
published; `make residuals` writes their file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

COVERAGE = 0.995
"""The share of cases that are to stay within their bound. It takes 199 residuals; with fewer, their largest bounds."""
FEWEST = 39
"""Residuals below which a kind is too fine to bound anything: 39 give a coverage of 97.5 %."""
ENOUGH = 99
"""Residuals from which a kind stands alone: 99 give a coverage of 99 %.

The bound of a kind with fewer is at least that of the next coarser ones.
"""
CONSTANT_BYTES = 128 << 20
"""Added to a prediction before a shortfall is compared with it: libraries take a few MiB whatever the size."""
FILE = "residuals.json"


class Kind(NamedTuple):
    """What the error of a prediction depends on, the most telling first: a coarser kind leaves out the last of them.

    `several` ranks share the work; the peak is one of `data`, as strategies declare it, and not of a step; the work is
    done in a `lower` precision than float32; a strategy computes `attention`, which libraries take scratch for.
    """

    place: str
    several: bool
    data: bool
    lower: bool
    attention: bool


class Residual(NamedTuple):
    """A peak that was predicted and measured, in bytes."""

    kind: Kind
    predicted_bytes: int
    measured_bytes: int

    @property
    def shortfall(self) -> float:
        """By how much the prediction was too low, relative to its size and a constant; negative if too high."""
        return (self.measured_bytes - self.predicted_bytes) / (self.predicted_bytes + CONSTANT_BYTES)


class Bound(NamedTuple):
    """Bytes that a case takes at most, and the probability with which it stays within them.

    It is the probability among all cases of the kind that the residuals are of, which may be a coarser one.
    """

    peak_bytes: int
    coverage: float


def at_most(kind: Kind, predicted_bytes: int, residuals: Sequence[Residual] | None = None) -> Bound | None:
    """Return the bound of a prediction, by the committed residuals or others; None where its place has too few.

    What several ranks take is not bounded by runs on one: of a place where none had several, nothing is known of them.
    """
    known = committed() if residuals is None else residuals
    if kind.several and not any(each.kind.several and each.kind.place == kind.place for each in known):
        return None
    bounds = [limit for same in alike(kind, known) if (limit := bound(predicted_bytes, same)) is not None]
    return Bound(max(each.peak_bytes for each in bounds), bounds[-1].coverage) if bounds else None


def alike(kind: Kind, residuals: Sequence[Residual]) -> Iterator[Sequence[Residual]]:
    """Yield the residuals of each kind that bounds this one: the finest that has some, then coarser ones to ENOUGH."""
    finer = 0
    for length in range(len(kind), 0, -1):
        same = [each for each in residuals if each.kind[:length] == kind[:length]]
        if len(same) >= FEWEST and len(same) > finer:
            yield same
        if len(same) >= ENOUGH:
            return
        finer = len(same)


def bound(predicted_bytes: int, residuals: Iterable[Residual]) -> Bound | None:
    """Return the bound that residuals of its kind give a prediction; it is never below the prediction."""
    shortfalls = sorted(each.shortfall for each in residuals)
    count = len(shortfalls)
    if not count:
        return None
    rank = min(count, math.ceil((count + 1) * COVERAGE))
    more = max(0.0, shortfalls[rank - 1]) * (predicted_bytes + CONSTANT_BYTES)
    return Bound(predicted_bytes + math.ceil(more), rank / (count + 1))


@cache
def committed() -> tuple[Residual, ...]:
    """Return the residuals of the package's file."""
    text = resources.files("harness.verdicts").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(Residual(Kind(*kind), *peaks) for kind, *peaks in json.loads(text)["residuals"])
