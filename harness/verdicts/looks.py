"""Stop timing a group early without erring more often: planned looks, each at a lower error, the same at all.

Pocock, Comparison sequential methods in the design and analysis of clinical trials, Biometrika 64 (1977), 191-199, with
the nominal error in place of the critical value, so that it holds for t statistics of any degrees of freedom (Jennison
and Turnbull, Comparison Sequential Methods, section 4.4).
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from harness.verdicts.pooled import BASELINES, DECIDED, ERROR, Pooled, Times, pooled

LOOKS = (4, 6, 8, 12, 16, 24)
_PER_ROW = 0.005
"""The error at which the ratio of nominal to whole error is computed: that of one row among ten. For the largest of
several statistics, looks inflate the error as they do for one of them at its own small error, so this is the cautious
end: at 0.05 the ratio is a fifth larger."""
_STEP = 0.2
"""Between points of the grid, in standard deviations of what is added from one look to the next."""


@dataclass(frozen=True)
class Look:
    """What is known after some rounds: the members decided, in words final or not, and those to be timed on.

    `remaining` holds the baselines too, in the order given, and is empty when the group is `finished`. `next_round` is
    the number of rounds at the next look; None when finished.
    """

    pooled: Pooled
    decided: tuple[str, ...]
    remaining: tuple[str, ...]
    next_round: int | None

    @property
    def finished(self) -> bool:
        return not self.remaining


def planned(rounds: int, looks: Sequence[int] = LOOKS) -> tuple[int, ...]:
    """Return the numbers of rounds after which a group of at most `rounds` is looked at, the last one included.

    Up to 4 rounds it is looked at once, when all are there. Raise ValueError below 1 round.
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds have no look: plan at least 1")
    return (*(look for look in looks if look < rounds), rounds)


def look(
    times: Times,
    rounds: int,
    looks: Sequence[int],
    baselines: Sequence[str] = BASELINES,
    final: Collection[str] = DECIDED,
    before: Look | None = None,
) -> Look:
    """Judge a group after `rounds` complete rounds, of which `looks` says when it may be judged at all.

    A member leaves with one of the words `final`, and keeps what was known of it then: pass the look `before`. Members
    without any time are left out of `remaining`: they failed. Between looks nothing is decided, since an unplanned look
    would add to the error. Raise ValueError for looks that do not increase, and for times as `pooled` does.
    """
    judged = pooled(times, baselines, nominal_error(tuple(looks)))
    if before is not None:
        judged = replace(judged, speeds={**judged.speeds, **{row: before.pooled.speeds[row] for row in before.decided}})
    last = rounds >= looks[-1]
    at_look = rounds in looks or last
    decided = tuple(
        row
        for row, speed in judged.speeds.items()
        if (before is not None and row in before.decided) or (at_look and speed.word in final)
    )
    undecided = [row for row in times if times[row] and row not in baselines and row not in decided]
    finished = last or not undecided
    remaining = () if finished else tuple(name for name in times if times[name] and name not in decided)
    return Look(judged, decided, remaining, None if finished else next(each for each in looks if each > rounds))


def replayed(
    times: Times,
    looks: Sequence[int],
    baselines: Sequence[str] = BASELINES,
    final: Collection[str] = DECIDED,
) -> Look:
    """Look at a group as often as was planned so far, each time at the rounds that were there then.

    It depends on the times alone, so an interrupted run goes on as it would have, and a report says what the run knew
    when a member left. A round is a number from 0, or a tuple that begins with it, such as round and block.
    """
    timed = _rounds(times)
    latest: Look | None = None
    for rounds in (*(each for each in looks if each < timed), timed):
        earlier = {name: {r: s for r, s in each.items() if _round(r) < rounds} for name, each in times.items()}
        latest = look(earlier, rounds, looks, baselines, final, latest)
        if latest.finished:
            break
    assert latest is not None  # the last round is always looked at
    return latest


def concluded(times: Times, looks: Sequence[int]) -> Pooled:
    """Judge a group that is timed no more: who left keeps what was known then, all others get the error that is left.

    Rounds may have ended before the last planned look, since the time for them was spent or somebody stopped them. What
    ends them must not be their outcome: then all intervals of the group hold together with the stated error. A row that
    left by other rules than these, and is not decided by them, gets the error of one look.
    """
    latest, made = replayed(times, looks), _rounds(times)
    judged = pooled(times, error=last_error(tuple(looks), made))
    early = {row for row in judged.speeds if _rounds({row: times[row]}) < made}
    at_a_look = pooled(times, error=nominal_error(tuple(looks))).speeds if early else {}
    speeds = {row: at_a_look[row] if row in early else speed for row, speed in judged.speeds.items()}
    return replace(judged, speeds={**speeds, **{row: latest.pooled.speeds[row] for row in latest.decided}})


def _rounds(times: Times) -> int:
    """Return how many rounds were begun."""
    return 1 + max((_round(number) for rounds in times.values() for number in rounds), default=-1)


def _round(number: Hashable) -> int:
    return int(number[0] if isinstance(number, tuple) else number)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def nominal_error(looks: tuple[int, ...], error: float = ERROR) -> float:
    """Return the error at which each look is to be made so that all of them together err with `error`.

    One look has all of it; six as planned by default have 0.23 of it each.
    """
    if not looks or any(later <= earlier for earlier, later in zip((0, *looks), looks, strict=False)):
        raise ValueError(f"looks after {list(looks)} rounds do not increase from 1: pass for example 4, 6, 8")
    if len(looks) == 1:
        return error
    nominal = _PER_ROW / math.sqrt(len(looks))
    for _ in range(4):  # the whole error is nearly proportional to the nominal one
        nominal *= _PER_ROW / ever_beyond(looks, nominal)
    return error * nominal / _PER_ROW


def ever_beyond(looks: Sequence[int], nominal: float) -> float:
    """Return the chance that a mean of independent normal values is beyond its two-sided `nominal` bound at any look.

    By recursion over the looks: the density of the sum, of those never beyond so far, on a grid (Armitage, McPherson
    and Rowe, 1969).
    """
    return 1 - sum(_within(looks, nominal).values())


@lru_cache(maxsize=256)
def last_error(looks: tuple[int, ...], rounds: int, error: float = ERROR) -> float:
    """Return the error for a look after which nothing is timed, so that with those before it errs with `error` in all.

    That is all of it before the first planned look, and that of a planned look at the last of them.
    """
    made = [each for each in looks if each < rounds]
    if not made:
        return error
    nominal = nominal_error(looks, error) * _PER_ROW / error
    density, more = _within(made, nominal), rounds - made[-1]
    least, most = nominal, _PER_ROW
    while most - least > 1e-3 * _PER_ROW:
        middle = (least + most) / 2
        beyond = 1 - sum(_spread_out(density, _bound(middle), rounds, more).values())
        least, most = (middle, most) if beyond < _PER_ROW else (least, middle)
    return error * least / _PER_ROW


def _bound(nominal: float) -> float:
    return -NormalDist().inv_cdf(nominal / 2)


def _within(looks: Sequence[int], nominal: float) -> dict[float, float]:
    """Return the density of the sum after the last look, of those never beyond the bound."""
    earlier, density = 0, {0.0: 1.0}
    for rounds in looks:
        earlier, density = rounds, _spread_out(density, _bound(nominal), rounds, rounds - earlier)
    return density


def _spread_out(density: Mapping[float, float], bound: float, rounds: int, more: int) -> dict[float, float]:
    """Return the density of a sum after some rounds more, of those within the bound; by symmetry folded to one side."""
    edge, spread = bound * math.sqrt(rounds), math.sqrt(more)
    count = math.ceil(edge / (_STEP * spread))
    edges = [edge * i / count for i in range(-count, count + 1)]
    masses = [0.0] * (2 * count)
    for at, mass in density.items():
        below = [math.erf((each - at) / (spread * math.sqrt(2))) for each in edges]
        for i in range(2 * count):
            masses[i] += mass * (below[i + 1] - below[i]) / 2
    middles = [edge * (i + 0.5) / count for i in range(count)]
    return {at: masses[count + i] + masses[count - 1 - i] for i, at in enumerate(middles)}
