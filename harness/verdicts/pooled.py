"""Judge all step times of a group together: ratios to the baselines with honest intervals, and a word for each.

The logarithm of a process's step time is taken as member + round + error, with one scale of the error for the whole
group, and a larger one for a member that is plainly less steady; the fit is robust (Huber's second proposal: location
and scale together). A process is the unit, since steps inside one scatter together. The baseline and the control that
changes nothing are both baselines: rows are compared with the mean of their processes on the ln scale, and all
comparisons of a group hold together with the stated error (Dunnett), whichever processes are missing. Pure
standard library, because the parent process imports it.
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median
from typing import Any

from harness.verdicts import dunnett
from harness.verdicts.interval import Interval

ERROR = 0.05
"""The chance that any interval of a group misses, over all rows and all looks."""
CHANGE_ERROR = 0.001
"""The chance that the time of an unchanged row seems to be another in another run."""
MARGIN = 1.05
"""Ratios nearer to 1 than this are as good as equal."""
LEAST_EFFECT = 1.02
"""Estimates nearer to 1 than this are never called faster or slower."""
BASELINES = ("baseline", "nothing")
LEAST_DEGREES = 3
"""Degrees of freedom from which on a scale is inferred: those of 4 members in 2 rounds, of 3 in 3, of 2 in 4. In fewer
an interval would be wider than any ratio that is looked for."""
FINAL = frozenset({"faster", "slower", "within 5 %"})
"""Words that more rounds would not make more precise."""
DECIDED = FINAL | {"at most 5 % slower"}
"""Words with which a row leaves the rounds: the question of a memory strategy is whether it costs time, and of one that
is at most 5 % faster it stays open."""
LONGEST_SECONDS, SHORTEST_SECONDS = 1e7, 1e-9
MOST_ROUNDS = 100
"""Above this many, no advice on rounds is worth much."""

Times = Mapping[str, Mapping[Any, float]]
"""For each member the seconds of each of its rounds; a round is any block of processes that ran next to each other."""

_TUNING = 1.5
"""Residuals beyond this many scales count as if they lay there (Huber, Robust Statistics, section 4.5)."""
_TAILS = 0.2
"""Intervals are wider by this over the mean number of rounds, since a scatter is taken from few processes."""
_STRAYS = 3
"""Over the mean number of rounds, the share at which the squares of residuals beyond the robust scatter count, at most
1: with few rounds no fit can tell stray processes from a slow member, with many it can. Both are calibrated by
re-sampling committed residuals, by normal errors of which 11 % scatter fourfold, and by equal processes of which 5 to
10 % take 10 to 40 % longer."""
_FARTHEST = 6
"""Residuals beyond this many scales count there as if they lay there: such a process is a stray, however far off."""
_UNSTEADY = 2.0
"""A member has a scatter of its own where the square of it is above the group's by so many times what chance makes of
it. With this an interval of a member that scatters three times as much holds in 90 to 98 of 100 groups of 4 to 16
rounds, where it held in 73 to 83, and those of equal members grow by up to 4 %, with stray processes by 6 to 9 % (all
by simulation, eight members)."""
_EXPECTED = (
    math.erf(_TUNING / math.sqrt(2))
    - math.sqrt(2 / math.pi) * _TUNING * math.exp(-(_TUNING**2) / 2)
    + _TUNING**2 * math.erfc(_TUNING / math.sqrt(2))
)
"""The mean square of a standard normal variable cut off at `_TUNING`."""


@dataclass(frozen=True)
class Speed:
    """The step time of a member as a multiple of the baselines'; above 1 is slower.

    `word` never says more than the interval. `rounds` counts the member's own processes. Without a `standard_error`
    (of ln ratio) there was too little to infer from, and the interval is the range seen. `more_rounds` is about how
    many more would decide a row that is not, or bring one that is to a `FINAL` word; None where it has one or none is
    near.
    """

    ratio: float
    interval: Interval
    word: str
    rounds: int
    more_rounds: int | None = None
    standard_error: float | None = None
    degrees: int = 0

    def __str__(self) -> str:
        """Return the ratio and its interval: `1.25 x (1.20-1.31)`."""
        return f"{self.ratio:.2f} x ({self.low:.2f}-{self.high:.2f})"

    @property
    def low(self) -> float:
        return self.interval.low

    @property
    def high(self) -> float:
        return self.interval.high

    @property
    def half_width(self) -> float:
        """Half the interval as a fraction."""
        return self.interval.half_width

    @property
    def inferred(self) -> Interval | None:
        """The interval, where there was enough to infer it; None where it is only the range seen."""
        return None if self.standard_error is None else self.interval

    def interval_at(self, error: float) -> Interval | None:
        """Return where this one ratio lies but for a chance of `error`; None where there was too little to infer."""
        if self.standard_error is None:
            return None
        factor = math.exp(dunnett.quantile(1, 0.0, self.degrees, error) * self.standard_error)
        return Interval(self.ratio / factor, self.ratio * factor)

    def change_since(self, other: "Speed", error: float) -> Interval | None:
        """Return where this ratio over that of another run lies but for a chance of `error`; None as above."""
        if self.standard_error is None or other.standard_error is None:
            return None
        both, degrees = math.hypot(self.standard_error, other.standard_error), min(self.degrees, other.degrees)
        factor = math.exp(dunnett.quantile(1, 0.0, degrees, error) * both)
        return Interval(self.ratio / other.ratio / factor, self.ratio / other.ratio * factor)


@dataclass(frozen=True)
class Pooled:
    """What the times of one group say together.

    `speeds` has one entry for each member that is no baseline, in the order given, and none if no baseline was timed.
    `control` is the second baseline against the first: a diagnostic at the plain 95 %, no row. `scatter` is that of a
    process around its member and round, as a fraction; None where it could not be inferred.
    """

    speeds: Mapping[str, Speed]
    control: Speed | None = None
    scatter: float | None = None
    degrees: int = 0


def pooled(times: Times, baselines: Sequence[str] = BASELINES, error: float = ERROR) -> Pooled:
    """Compare every member of a group with the mean of its baselines, in seconds of one value per process.

    Members may lack rounds. `error` is for all rows together: with planned looks pass `looks.nominal_error`. Raise
    ValueError if a time is not a positive, finite and sane number of seconds.
    """
    check_seconds(times)
    times = {member: rounds for member, rounds in times.items() if rounds}
    present = [name for name in baselines if name in times]
    rows = [member for member in times if member not in baselines]
    if not present:
        return Pooled({})
    joined = _joined(times, present[0])
    anchors = [name for name in present if name in joined]
    fit = _fit({member: times[member] for member in times if member in joined})
    if fit is None:
        return Pooled(
            {row: _range(times[row], [times[name] for name in present]) for row in rows},
            _range(times[present[1]], [times[present[0]]]) if len(present) > 1 else None,
        )
    inferred = [row for row in rows if row in joined]
    speeds = {row: _range(times[row], [times[name] for name in present]) for row in rows}
    if inferred:
        processes = sum(len(times[name]) for name in anchors)  # one that died early is to weigh little
        marks = {name: -len(times[name]) / processes for name in anchors}
        contrasts = [{row: 1.0, **marks} for row in inferred]
        bound = dunnett.quantile(len(inferred), fit.least_correlation(contrasts), fit.degrees, error)
        for row, contrast in zip(inferred, contrasts, strict=True):
            speeds[row] = _speed(fit, contrast, bound, len(times[row]))
    control = None
    if len(anchors) > 1:
        bound = dunnett.quantile(1, 0.0, fit.degrees, ERROR)
        control = _speed(fit, {anchors[1]: 1.0, anchors[0]: -1.0}, bound, len(times[anchors[1]]))
    return Pooled(speeds, control, math.expm1(fit.scatter), fit.degrees)


def word_of(ratio: float, interval: Interval) -> str:
    """Return the word that an estimate and its interval earn; the first that holds, from "slower" to "open"."""
    if interval > 1 and ratio > LEAST_EFFECT:
        return "slower"
    if interval < 1 and ratio < 1 / LEAST_EFFECT:
        return "faster"
    if interval.inside(1 / MARGIN, MARGIN):
        return "within 5 %"
    if interval < MARGIN:
        return "at most 5 % slower"
    return "at most 5 % faster" if interval > 1 / MARGIN else "open"


def check_seconds(times: Times) -> None:
    """Raise ValueError for the first time that no step can take."""
    for member, rounds in times.items():
        for number, seconds in rounds.items():
            if not (math.isfinite(seconds) and SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS):
                raise ValueError(
                    f"'{member}' has a step time of {seconds!r} s in round {number}: pass seconds from "
                    f"{SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g}"
                )


@dataclass(frozen=True)
class _Fit:
    """Robust means of members on the ln scale, and what is needed for the errors of their differences."""

    means: Mapping[str, float]
    scatter: float
    """Standard deviation that an error would have if least squares with it were as exact as this fit."""
    scale: float
    """That beyond 1.5 of which residuals are cut off."""
    widening: float
    degrees: int
    order: Mapping[str, int] = field(repr=False)
    inverse: Sequence[Sequence[float]] = field(repr=False)
    counts: Mapping[str, int] = field(repr=False)
    unsteadiness: Mapping[str, float] = field(repr=False)

    def covariance(self, first: Mapping[str, float], second: Mapping[str, float]) -> float:
        """Return the covariance of two contrasts (weights that add to 0) in units of the squared scatter."""
        order, inverse = self.order, self.inverse
        return sum(a * b * inverse[order[m]][order[n]] for m, a in first.items() for n, b in second.items())

    def standard_error(self, contrast: Mapping[str, float]) -> float:
        """Return the standard error of a contrast, in which each member scatters as much as it does."""
        alike = {member: weight**2 / self.counts[member] for member, weight in contrast.items()}
        own = sum(square * self.unsteadiness[member] ** 2 for member, square in alike.items()) / sum(alike.values())
        return self.scatter * self.widening * math.sqrt(own * self.covariance(contrast, contrast))

    def least_correlation(self, contrasts: Sequence[Mapping[str, float]]) -> float:
        """Return the least correlation between any two contrasts, rounded down: less of it gives a larger quantile."""
        spreads = [math.sqrt(self.covariance(each, each)) for each in contrasts]
        least = min(
            (
                self.covariance(contrasts[i], contrasts[j]) / (spreads[i] * spreads[j])
                for i in range(len(contrasts))
                for j in range(i)
            ),
            default=0.0,
        )
        return max(0.0, math.floor(least * 50 + 1e-6) / 50)


def _joined(times: Times, first: str) -> set[str]:
    """Return the members that rounds join to the first baseline, directly or over others: only these compare."""
    members, rounds = {first}, set(times[first])
    while True:
        more = {member for member in times if member not in members and rounds & set(times[member])}
        if not more:
            return members
        members |= more
        rounds |= {number for member in more for number in times[member]}


@dataclass(frozen=True)
class _Design:
    """Which processes there are: a cell of member and round for each, and how many each round has.

    `order` is the place of each member, `inverse` that of the normal equations of the members.
    """

    order: Mapping[str, int]
    cells: Sequence[tuple[int, int]]
    sizes: Sequence[int]
    inverse: Sequence[Sequence[float]]
    degrees: int


def _design(times: Times) -> _Design | None:
    """Return the design of member + round; None where fewer than `LEAST_DEGREES` of freedom are left."""
    order = {member: index for index, member in enumerate(times)}
    numbers = {number: index for index, number in enumerate(dict.fromkeys(r for each in times.values() for r in each))}
    cells = [(order[member], numbers[number]) for member, rounds in times.items() for number in rounds]
    degrees = len(cells) - len(order) - len(numbers) + 1
    if degrees < LEAST_DEGREES:
        return None
    sizes = [0] * len(numbers)
    for _, number in cells:
        sizes[number] += 1
    return _Design(order, cells, sizes, _inverse(cells, len(order), len(numbers)), degrees)


def _least_squares(design: _Design, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the least-squares member and round effects of one value for each cell; the first member's is 0.

    A design that lacks cells is solved exactly, by the inverse of its normal equations without the rounds.
    """
    levels = [0.0] * len(design.sizes)
    for (_, number), value in zip(design.cells, values, strict=True):
        levels[number] += value
    levels = [total / size for total, size in zip(levels, design.sizes, strict=True)]
    sums = [0.0] * len(design.order)
    for (member, number), value in zip(design.cells, values, strict=True):
        sums[member] += value - levels[number]
    members = [_dot(row, sums) for row in design.inverse]
    shares = [0.0] * len(design.sizes)
    for member, number in design.cells:
        shares[number] += members[member]
    rounds = [level - share / size for level, share, size in zip(levels, shares, design.sizes, strict=True)]
    return members, rounds


def _fit(times: Times) -> _Fit | None:
    """Fit member + round to the logarithms; None where too little is there to infer from.

    Huber and Dutter's algorithm: least squares on residuals that are cut off, step by step, and the scale with them.
    """
    design = _design(times)
    if design is None:
        return None
    cells, degrees = design.cells, design.degrees
    residuals = [math.log(seconds) for rounds in times.values() for seconds in rounds.values()]
    means, scale = [0.0] * len(design.order), 0.0
    winsorised = residuals
    for step in range(60):
        shifts, moves = _least_squares(design, winsorised)
        means = [mean + shift for mean, shift in zip(means, shifts, strict=True)]
        residuals = [
            value - shifts[member] - moves[number] for (member, number), value in zip(cells, residuals, strict=True)
        ]
        if step == 0:
            squares = math.sqrt(_dot(residuals, residuals) / degrees)
            scale, least = squares, max(0.1 * squares, 1e-9)  # equal times must not divide by nothing
        limit = _TUNING * max(scale, least)
        winsorised = [min(limit, max(-limit, value)) for value in residuals]
        before, scale = scale, max(least, math.sqrt(_dot(winsorised, winsorised) / (degrees * _EXPECTED)))
        if step and max(map(abs, shifts)) < 1e-4 * scale and abs(scale - before) < 1e-4 * scale:
            break
    whole = sum(abs(value) < limit for value in residuals) / len(cells)
    lost = 1 - degrees / len(cells)
    correction = 1 + lost * (1 - whole) / whole  # Huber, section 7.6
    scatter = math.sqrt(_dot(winsorised, winsorised) / degrees) / whole * correction
    rounds = len(cells) / len(design.order)
    strays = [min(_FARTHEST * scale, max(-_FARTHEST * scale, value)) for value in residuals]
    beyond = max(0.0, _dot(strays, strays) / degrees - scatter**2) * min(1.0, _STRAYS / rounds)
    return _Fit(
        dict(zip(design.order, means, strict=True)),
        scatter if squares > 1e-12 else 0.0,
        scale,
        (1 + _TAILS / rounds) * math.sqrt(1 + (beyond / scatter**2 if scatter else 0.0)),
        degrees,
        design.order,
        design.inverse,
        {member: len(rounds) for member, rounds in times.items()},
        _unsteadiness(design, strays, scatter**2 + beyond),
    )


def _unsteadiness(design: _Design, residuals: Sequence[float], square: float) -> dict[str, float]:
    """Return how many times the group's the scatter of each member is: 1 where chance explains the difference.

    `square` is that of the group's scatter. The largest residual of each member is left out: one stray process says
    nothing of the others. The square of the largest of n is about what 0.54 of n lie beyond.
    """
    own: list[list[float]] = [[] for _ in design.order]
    for (at, _), residual in zip(design.cells, residuals, strict=True):
        own[at].append(residual)
    left = square * (1 - len(design.sizes) / len(design.cells))  # of a residual, after the rounds are fitted
    times = dict.fromkeys(design.order, 1.0)
    for member, values in zip(design.order, own, strict=True):
        n = len(values)
        if n < LEAST_DEGREES or not left:
            continue
        middle = fmean(values)
        *others, _ = sorted((value - middle) ** 2 for value in values)
        expected = 1 - NormalDist().inv_cdf(1 - 0.27 / n) ** 2 / n
        ratio = sum(others) / (n - 1) / expected / left
        if ratio > 1 + _UNSTEADY * math.sqrt(2 / (n - 1)):
            times[member] = math.sqrt(ratio)
    return times


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(map(float.__mul__, first, second))


def _inverse(cells: Sequence[tuple[int, int]], members: int, rounds: int) -> list[list[float]]:
    """Invert the normal equations of the members, rounds eliminated, with member 0 held at zero.

    They are those of a graph in which members that share a round of n are joined with strength 1 / n.
    """
    in_round: list[list[int]] = [[] for _ in range(rounds)]
    for member, number in cells:
        in_round[number].append(member)
    matrix = [[0.0] * members for _ in range(members)]
    for present in in_round:
        share = 1 / len(present)
        for member in present:
            row = matrix[member]
            row[member] += 1
            for other in present:
                row[other] -= share
    rows = [row[1:] + [float(i == j) for j in range(1, members)] for i, row in enumerate(matrix) if i]
    size = members - 1
    for i in range(size):  # positive definite: no pivoting
        pivot = rows[i][i]
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and (factor := rows[j][i]):
                rows[j] = [value - factor * other for value, other in zip(rows[j], rows[i], strict=True)]
    return [[0.0] * members, *([0.0, *row[size:]] for row in rows)]


def _speed(fit: _Fit, contrast: Mapping[str, float], bound: float, rounds: int) -> Speed:
    error = fit.standard_error(contrast)
    estimate = sum(weight * fit.means[member] for member, weight in contrast.items())
    width = bound * error
    ratio = math.exp(estimate)
    interval = Interval(math.exp(estimate - width), math.exp(estimate + width))
    word = word_of(ratio, interval)
    more = None if word in FINAL else _more_rounds(estimate, width, rounds, word)
    return Speed(ratio, interval, word, rounds, more, error, fit.degrees)


def _more_rounds(estimate: float, width: float, rounds: int, word: str) -> int | None:
    """Return about how many more rounds make an interval narrow enough, which it becomes with the root of rounds."""
    away = abs(estimate) if abs(estimate) > math.log(LEAST_EFFECT) else 0.0
    needed = max(away, math.log(MARGIN) - abs(estimate))
    if word not in DECIDED:  # for what may be faster, "at most 5 % slower" is enough
        needed = max(needed, math.log(MARGIN) - estimate)
    total = rounds * (width / needed) ** 2 if needed > 0 else math.inf
    return max(1, math.ceil(total - rounds)) if total <= MOST_ROUNDS else None


def _range(times: Mapping[Hashable, float], baselines: Collection[Mapping[Hashable, float]]) -> Speed:
    """Return the range of ratios by round; where no round has both, that of all times against all of the baselines."""
    ratios = [
        math.log(seconds) - sum(math.log(each[number]) for each in partners) / len(partners)
        for number, seconds in times.items()
        if (partners := [each for each in baselines if number in each])
    ] or [math.log(own / other) for own in times.values() for each in baselines for other in each.values()]
    return Speed(math.exp(median(ratios)), Interval(math.exp(min(ratios)), math.exp(max(ratios))), "open", len(times))
