"""Cut a long round into blocks of neighbours in time, each with the baseline in it."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from harness.verdicts.pooled import BASELINES

LIMIT_SECONDS = 20.0
"""How long a block may take; over a longer time a machine drifts as much as processes scatter."""
LEAST = 3
"""Members of a block, where there are so many: the baseline and two more."""


def blocks(
    members: Sequence[str],
    seconds: Mapping[str, float],
    group: str,
    round: int,
    limit: float = LIMIT_SECONDS,
    baselines: Sequence[str] = BASELINES,
    sizes: Mapping[str, float] | None = None,
    room: float = math.inf,
) -> list[list[str]]:
    """Return the processes of one round in the order to run them, in blocks of about `limit` seconds.

    Every block has the first baseline and, where there are enough members, two more, so a block of slow processes may
    last longer. Everybody else is in one block, the control in each in turn over the rounds. Who meets whom and the
    order are drawn anew each round, by a seed that names the group, the same on every Python. `seconds` estimates the
    processes; a member without an estimate counts as the median of the others, and none as more than a third of a
    block. The `sizes` of a block, of processes that live side by side, are within `room` as far as that can be.
    """
    # Python promises that random() repeats across versions, not that shuffle() does. A string seed is independent of
    # PYTHONHASHSEED.
    draw = random.Random(f"{group}/{round}").random
    usual = median(seconds.values()) if seconds else 0.0
    cost = {member: min(seconds.get(member, usual), limit / LEAST) for member in members}
    size = {member: (sizes or {}).get(member, 0.0) for member in members}
    anchor = next((member for member in members if member == baselines[0]), None)
    others = _shuffled([member for member in members if member != anchor], draw)
    turning = [member for member in others if member in baselines]
    others = [member for member in others if member not in baselines]
    others.sort(key=lambda member: size[member] <= room / LEAST)  # who fills the memory chooses first
    most = max(1, (len(others) + len(turning)) // 2) if anchor is not None else 1
    cut: list[list[str]] = []
    for count in range(1, most + 1):
        cut = [[anchor] if anchor is not None else [] for _ in range(count)]
        for place, member in enumerate(turning):
            cut[(round + place) % count].append(member)
        for member in others:
            fitting = [block for block in cut if _total(size, block) + size[member] <= room] or cut
            needy = [block for block in fitting if len(block) < LEAST] if count > 1 else fitting
            min(needy or fitting, key=lambda block: _total(cost, block)).append(member)
        if all(_total(cost, block) <= limit and _total(size, block) <= room for block in cut):
            break
    return _shuffled([_shuffled(block, draw) for block in cut if block], draw)


def _total(values: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(values[name] for name in names)


def _shuffled(values: Sequence[Any], draw: Callable[[], float]) -> list[Any]:
    return sorted(values, key=lambda _: draw())
