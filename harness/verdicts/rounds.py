"""Which members of a comparison are timed next, which rounds are complete, and when its times are decided."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from harness.verdicts import looks

Seconds = Mapping[tuple[int, int], float]
"""Step times of a member by round and block."""
Timed = TypeVar("Timed")


class Turn(NamedTuple):
    """The round to be timed next and the members that take part; none when the times are decided."""

    round: int
    members: tuple[str, ...]


def next_turn(
    members: Sequence[str],
    times: Mapping[str, Seconds],
    failed: Mapping[str, set[int]],
    rounds: int,
    staying: Collection[str] = (),
) -> Turn:
    """Return the first round that lacks a member.

    `times` are those measured, `failed` the rounds in which a member ended without one. After a round that is one of
    the planned looks, members whose time is decided leave, but for those `staying`; what depends on the times alone is
    found again after an interruption. A round that lacks a member is timed again whole, since its members must be
    neighbours in time.
    """
    planned = looks.planned(rounds) if rounds else ()
    present = tuple(members)
    for number in range(rounds):
        for member in present:
            if number not in {at for at, _ in times.get(member, {})} | failed.get(member, set()):
                return Turn(number, present)
        if number + 1 in planned:
            look = looks.replayed(before({member: times.get(member, {}) for member in members}, number + 1), planned)
            present = tuple(
                member for member in present if member in look.remaining or (member in staying and times.get(member))
            )
            if not present:
                return Turn(number + 1, ())
    return Turn(rounds, ())


def left(processes: Mapping[str, Mapping[tuple[int, int], Any]], rounds: int) -> dict[str, set[int]]:
    """Return the rounds that went on without a member, which had left at a look, by rules that may be others now.

    An interruption leaves none of these, since what it cut short is timed again before another round begins: so at
    least one whole round must have gone on without the member.
    """
    numbers = {member: {number for number, _ in each} for member, each in processes.items()}
    newest = max((number for each in numbers.values() for number in each), default=0)
    planned = looks.planned(rounds) if rounds else ()
    return {
        member: set(range(newest + 1)) - own
        for member, own in numbers.items()
        if own == set(range(len(own))) and len(own) in planned and len(own) < newest
    }


def before(times: Mapping[str, Mapping[tuple[int, int], Any]], round: int) -> dict[str, dict[tuple[int, int], Any]]:
    """Return the times of the rounds before one."""
    return {member: {at: each for at, each in rounds.items() if at[0] < round} for member, rounds in times.items()}


def newest(
    timed: Mapping[str, Mapping[tuple[int, int], Timed]], runs: Mapping[str, Mapping[tuple[int, int], str]]
) -> dict[str, dict[tuple[int, int], Timed]]:
    """Return of each round what its newest run timed; `runs` names the run of each process, and names sort by time.

    A round that was interrupted is timed again whole, in blocks that may be others: what was timed before of it has no
    neighbours any more.
    """
    latest: dict[int, str] = {}
    for each in runs.values():
        for (number, _), run in each.items():
            latest[number] = max(latest.get(number, ""), run)
    return {
        member: {at: value for at, value in rounds.items() if runs[member][at] == latest[at[0]]}
        for member, rounds in timed.items()
    }
