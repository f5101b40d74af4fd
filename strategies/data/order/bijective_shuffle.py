"""Compute each position of a pseudo-random permutation when it is needed; pay arithmetic per index.

Peak: nothing beyond the indices of a batch. A Feistel network (Luby and Rackoff 1988) permutes the numbers below the
next even power of two, fewer than 4 N. A result of N or more is permuted again until it is below N (cycle walking,
Black and Rogaway 2002); so the whole is a permutation of N. Each of the `rounds` rounds has a key of its own. Not every
permutation can come up. Grain's `index_shuffle` works the same way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl


def permuted(x_K: Any, keys: Any, half: int) -> Any:
    """Permute numbers below 4^half: each round swaps the two halves and adds a hash of one to the other."""
    import numpy as np

    left, right, mask = x_K >> np.uint64(half), x_K & np.uint64((1 << half) - 1), np.uint64((1 << half) - 1)
    for key in keys:
        left, right = right, left ^ (mixed(right + key) & mask)
    return left << np.uint64(half) | right


def mixed(z_K: Any) -> Any:
    """Hash 64 bits to 64 bits, modulo 2^64 (the finaliser of splitmix64)."""
    import numpy as np

    z_K = (z_K ^ (z_K >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_K = (z_K ^ (z_K >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_K ^ (z_K >> np.uint64(31))


def on_any(parts: Parts, rounds: int = 4) -> Parts:
    if rounds < 2:
        raise ValueError(
            f"bijective_shuffle: {rounds} rounds leave half of each index unchanged: set rounds to 2 or more"
        )

    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        count = source.count
        half = max(1, ((count - 1).bit_length() + 1) // 2)
        keys = np.random.SeedSequence(source.seed, spawn_key=(epoch,)).generate_state(rounds, np.uint64)

        def at(start: int, stop: int) -> Any:
            indices_K = permuted(np.arange(start, max(start, min(stop, count)), dtype=np.uint64), keys, half)
            outside = np.flatnonzero(indices_K >= count)
            while len(outside):
                indices_K[outside] = permuted(indices_K[outside], keys, half)
                outside = outside[indices_K[outside] >= count]
            return indices_K.astype(np.int64)

        return at

    return replace(parts, order=order)


def holds(extent: Extent, rounds: int = 4) -> Holding:
    """Count nothing: each index is computed."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("bijective_shuffle", rewrites=("order",), on=on, about=__doc__, feeds="reordered", holds=holds)]
