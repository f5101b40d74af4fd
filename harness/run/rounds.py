"""Which members of a comparison are timed next, and when its times are decided."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from harness.verdicts import looks

Seconds = Mapping[tuple[int, int], float]
"""Step times of a member by round and block."""


class Turn(NamedTuple):
    """The round to be timed next and the members that take part; none when the times are decided."""

    round: int
    members: tuple[str, ...]


def next_turn(
    members: Sequence[str], times: Mapping[str, Seconds], failed: Mapping[str, set[int]], rounds: int
) -> Turn:
    """Return the first round that lacks a member.

    `times` are those measured, `failed` the rounds in which a member ended without one. After a round that is one of
    the planned looks, members whose time is decided leave; what depends on the times alone is found again after an
    interruption. A round that lacks a member is timed again whole, since its members must be neighbours in time.
    """
    planned = looks.planned(rounds) if rounds else ()
    present = tuple(members)
    for number in range(rounds):
        for member in present:
            if number not in {at for at, _ in times.get(member, {})} | failed.get(member, set()):
                return Turn(number, present)
        if number + 1 in planned:
            earlier = {
                member: {at: seconds for at, seconds in times.get(member, {}).items() if at[0] <= number}
                for member in members
            }
            look = looks.replayed(earlier, planned)
            if look.finished:
                return Turn(number + 1, ())
            present = tuple(member for member in present if member in look.remaining)
    return Turn(rounds, ())
