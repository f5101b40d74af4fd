"""Who trains on what of a batch: which of several strategies divides it, and the blocks of a row that a rank takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Parts

WHOLE, ROWS, TOKENS = range(3)
"""How finely a batch is divided, see `harness.Division`."""
OF_EMBED = ("embed", "position")
"""The parameters that `embed` reads, as far as a model has them."""


def dividing(parts: Parts, shard_batch: Callable[..., Any], granularity: int, reduced: Callable[..., Any]) -> Parts:
    """Divide the batch by `shard_batch` and sum loss and gradients by `reduced`, unless another strategy does.

    Of several the one that divides the batch most finely stays: by tokens before by rows, and either before all for
    all. The first that sums gradients does so for all.
    """
    division = parts.division
    if not division.gradients_reduced:
        parts = replace(parts, reduce_gradients=reduced)
    if not division.gradients_reduced or granularity > division.granularity:
        parts = replace(parts, shard_batch=shard_batch)
    finest = max(granularity, division.granularity)
    return replace(parts, division=replace(division, granularity=finest, gradients_reduced=True))


def rows(count: int) -> str:
    """Write how many rows there are."""
    return f"{count} row{'' if count == 1 else 's'}"


def in_order(rank: int, ranks: int) -> tuple[int, ...]:
    """Return the one stretch of every row that a rank takes, in the order of the ranks."""
    return (rank,)


def folded(rank: int, ranks: int) -> tuple[int, ...]:
    """Return a stretch from the beginning and one from the end of every row: so all see about as many tokens."""
    return rank, 2 * ranks - 1 - rank
