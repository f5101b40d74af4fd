"""Rows on the host: token ids as a source, plain windows over a source, and indices in batches.

Everything here is numpy; each backend hands the batches to its device.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.types import Parts, Source, Windows

IGNORED = -100
"""The target that carries no loss, as in torch."""


def token_source(parts: Parts, corpus: Any, seed: int) -> Source:
    """Load the ids of a corpus, or draw Zipf-distributed ones where there is none (`corpus` None).

    Inputs and targets are two views of one array [n], one id apart.
    """
    shape = parts.shape
    rows = shape.tokens + shape.step * (4 * shape.batch - 1) + 1
    ids_N = drawn_ids(rows, shape.vocabulary, seed) if corpus is None else _opened(corpus)
    targets_N = ids_N[1:]
    if shape.ignored:
        masked = np.random.Generator(np.random.Philox(key=seed + 1)).random(len(targets_N)) < shape.ignored
        targets_N = np.where(masked, IGNORED, targets_N.astype(np.int32)).astype(np.int32)
    return Source(ids_N[:-1], targets_N, shape.tokens, shape.step, shape.batch, seed=seed, vocabulary=shape.vocabulary)


def _opened(corpus: Any) -> Any:
    from harness.tokens import open_tokens

    return open_tokens(corpus)


def drawn_ids(rows: int, vocabulary: int, seed: int) -> Any:
    """Draw ids [rows] with probability falling as 1 / (rank + 1), from a seed alone."""
    weights = 1.0 / np.arange(1, vocabulary + 1)
    uniform = np.random.Generator(np.random.Philox(key=seed)).random(rows)
    return np.searchsorted(np.cumsum(weights) / weights.sum(), uniform).clip(0, vocabulary - 1).astype(np.int32)


def plain_windows(parts: Parts, source: Source) -> Windows:
    """Slice each window of a batch from the source when it is asked for; keep nothing."""

    def batch(indices_B: Any) -> tuple[Any, Any]:
        starts = [int(i) * source.stride for i in indices_B]
        x = np.stack([source.inputs[s : s + source.window] for s in starts])
        y = np.stack([source.targets[s : s + source.window] for s in starts])
        return x, y

    return Windows(source, batch)


def index_batches(source: Source) -> Iterator[Any]:
    """Yield the window indices [B] of one batch after another, epoch after epoch, the ragged last one dropped.

    Raises ValueError when the source does not hold a single batch.
    """
    count, batch = source.count, source.batch
    if count < batch:
        raise ValueError(f"the source holds {count} windows, fewer than one batch of {batch}: use a longer corpus")
    epoch = 0
    while True:
        order_N = np.arange(count)
        if source.shuffle:
            np.random.Generator(np.random.PCG64(np.random.SeedSequence([source.seed, epoch]))).shuffle(order_N)
        for start in range(0, count - batch + 1, batch):
            yield order_N[start : start + batch]
        epoch += 1
