"""Whole documents on the host: a source of them, and batches padded to the longest of each.

In JAX a step is compiled for one size, so there each batch is padded to the window.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract.data import IGNORED, Documents, Extent, Source, Windows
from harness.contract.parts import Parts
from harness.workloads.data import rows

USUAL = 4
"""How many times longer than a usual drawn document the longest may be."""


def source(parts: Parts, seed: int) -> Documents:
    """Open the documents of the corpus, or files of drawn ones where there is none.

    A document of n tokens has n - 1 rows: the inputs are all but its last token, the targets all but its first.
    """
    shape = parts.shape
    file = parts.corpus
    path, beside = (file.path, file.lengths) if file is not None else _drawn(shape, seed)
    ids_N, lengths_D = parts.rows(parts, path), np.load(beside)
    if file is not None and file.left_out:
        parts.notes["left out"] = f"{file.left_out} documents of more than {shape.tokens + 1:,} tokens"
    return Documents(
        ids_N[:-1],
        rows.masked(ids_N[1:], shape.ignored, seed),
        shape.tokens,
        shape.tokens,
        shape.batch,
        seed=seed,
        shuffle=shape.shuffle,
        vocabulary=shape.vocabulary,
        firsts_N=np.cumsum(lengths_D) - lengths_D,
        lengths_N=lengths_D - 1,
    )


def windows(parts: Parts, source: Source) -> Windows:
    """Pad the documents of a batch at their ends: inputs with 0, targets with what carries no loss."""
    assert isinstance(source, Documents)
    fixed = source.window if parts.place.backend == "jax" else None

    def size(indices_B: Any) -> tuple[int, int]:
        return len(indices_B), fixed or int(source.lengths_N[indices_B].max())

    def batch(indices_B: Any) -> tuple[Any, Any]:
        indices_B = source.checked(indices_B)
        x_BT = np.zeros(size(indices_B), np.int32)
        y_BT = np.full_like(x_BT, IGNORED)
        for row, index in enumerate(indices_B):
            first, length = source.firsts_N[index], source.lengths_N[index]
            x_BT[row, :length] = source.inputs[first : first + length]
            y_BT[row, :length] = source.targets[first : first + length]
        return x_BT, y_BT

    return Windows(source, batch, size=size)


def extent(shape: Any, corpus: Any, steps: int) -> Extent:
    """Return the sizes of the source, its batches at their longest."""
    ids = corpus.tokens if corpus is not None else int(drawn_lengths(shape, 0).sum())
    item = np.dtype(corpus.dtype).itemsize if corpus is not None else 4
    window = min(shape.tokens, ids - 1)
    targets = 4 if shape.ignored else 0
    return Extent(
        ids - 1,
        item,
        targets,
        window,
        window,
        shape.batch,
        steps,
        values=shape.vocabulary,
        small_ints=rows.small_ints(shape, corpus),
    )


def drawn_lengths(shape: Any, seed: int) -> Any:
    """Draw the tokens of each document from a log-normal distribution, cut at both ends."""
    normal = np.random.Generator(np.random.Philox(key=seed + 2)).standard_normal(shape.documents)
    tokens = shape.tokens / USUAL * np.exp(normal)
    return np.clip(tokens.astype(np.int64), 2, shape.tokens + 1)


def _drawn(shape: Any, seed: int) -> tuple[Path, Path]:
    lengths_D = drawn_lengths(shape, seed)
    total = int(lengths_D.sum())
    name = f"{shape.documents}-{shape.tokens}-{shape.vocabulary}-{seed}"
    ids = partial(rows.drawn_ids, total, shape.vocabulary, seed)
    return rows.drawn_file(f"documents-{name}", ids), rows.drawn_file(f"lengths-{name}", lambda: lengths_D)
