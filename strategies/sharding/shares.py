"""Who trains on what of a batch: which of several strategies divides it, and the blocks of a row that a rank takes."""

from collections.abc import Callable
from typing import Any

from harness import Parts


def chosen(parts: Parts, share: Callable[..., Any], summed: Callable[..., Any]) -> dict[str, Any]:
    """Give the parts `share` and `reduce` of a strategy that divides the batch by `share` and sums by `summed`.

    Of several the one that divides it most finely stays: by tokens before by rows, and either before all for all. Who
    has replaced `reduce` keeps it.
    """
    present = getattr(parts.share, "fineness", -1)
    taken = hasattr(parts.reduce, "over_ranks")
    return {
        "share": share if getattr(share, "fineness", 0) > present else parts.share,
        "reduce": parts.reduce if taken else summed,
    }


def in_order(rank: int, ranks: int) -> tuple[int, ...]:
    """Give each rank one stretch of every row, one after the other."""
    return (rank,)


def folded(rank: int, ranks: int) -> tuple[int, ...]:
    """Give each rank a stretch from the beginning and one from the end: so all see about as many tokens."""
    return rank, 2 * ranks - 1 - rank
