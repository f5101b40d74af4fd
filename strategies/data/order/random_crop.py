"""Draw each window at random, with replacement; pay with windows that are never seen.

Peak: nothing beyond the indices of a batch. nanoGPT's `get_batch` works in this way. There is no epoch: N draws see 63
% of N windows. The draw of a position is a function of seed, epoch and position (numpy Philox, a counter), so that a
run that resumes does not draw the first crops again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl

PER_COUNT = 4
"""The draws that Philox makes from one value of its counter."""


def on_any(parts: Parts) -> Parts:
    def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
        import numpy as np

        count = source.count
        key = np.random.SeedSequence(source.seed, spawn_key=(epoch,)).generate_state(2, np.uint64)

        def at(start: int, stop: int) -> Any:
            stop = max(start, min(stop, count))
            passed, skipped = divmod(start, PER_COUNT)
            generator = np.random.Generator(np.random.Philox(key=key).advance(passed))
            return (generator.random(stop - start + skipped)[skipped:] * count).astype(np.int64)

        return at

    return replace(parts, order=order)


def holds(extent: Extent) -> Holding:
    """Count nothing: each index is drawn."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [
        Strategy("random_crop", rewrites=("order",), on=on, about=__doc__, approximate=True, feeds="other", holds=holds)
    ]
