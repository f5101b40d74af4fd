"""How good a shuffle is: the randomness of an order, and the share of the windows that it reaches."""

from typing import Any

import numpy as np

BINS = 256


def quality(indices_N: Any) -> float:
    """Compute how random the order of one epoch is: 0 for the sequential one, about 1 for a random permutation.

    It is H(counts) / H(random), with H(p) = -sum p_b log p_b over 256 equal bins b of 0 to N. `counts` is the share of
    the N - 1 distances |i[k+1] - i[k]| between neighbours that fall into a bin; `random` the share expected of a
    uniform permutation, in which the distance d has probability 2 (N - d) / (N (N - 1)), a triangle. An order which
    moves windows only within chunks has short distances alone, and so few bins. It sees neighbours only: one long
    stride taken throughout is 0 as well. Fewer than 3 windows have nothing to shuffle, and give 0.
    """
    order_N = np.asarray(indices_N).astype(np.int64)
    count = len(order_N)
    if count < 3:
        return 0.0
    distances = np.arange(1, count)
    expected = np.bincount(distances * BINS // count, weights=count - distances, minlength=BINS)
    counts = np.bincount(np.abs(np.diff(order_N)) * BINS // count, minlength=BINS)
    return _entropy(counts) / _entropy(expected)


def _entropy(weights: Any) -> float:
    shares = weights[weights > 0] / weights.sum()
    return abs(float(-(shares * np.log(shares)).sum()))  # abs: a single bin gives -0.0


def coverage(indices: Any, count: int) -> float:
    """Compute the share of `count` windows that are among the indices at least once."""
    seen = np.zeros(count, bool)
    seen[np.asarray(indices)] = True
    return float(seen.mean())
