"""Keep the `size` most frequent words and replace all others by the unknown word; pay the meaning of those words.

Peak: embedding and head (and their gradients and moments) have `size` rows instead of the vocabulary's; the ids keep
their type, and lie in memory, where they are changed. Source: the capped vocabularies of torchtext and Keras.

Ids are ranked by frequency with 0 for the unknown word, as in the tokenizer `words`, so that ids from `size` on become
0. Those of bytes and of files may be in another order: ids are refused whose first `size` are much rarer than the most
frequent. Losses over different vocabularies are not comparable. A vocabulary of `size` words or fewer stays as it is,
which is noted.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Extent, Holding, Parts, Strategy, hookimpl

UNKNOWN = 0
CHUNK = 1 << 20
PIECE = 1 << 17
"""Ids that are counted at a time: numpy makes 8 bytes of each."""
RANKED = 0.75
"""What the first ids must be of what the most frequent are: a part of a corpus has frequencies of its own."""


def on_any(parts: Parts, size: int = 10000) -> Parts:
    return fewer_words("capped_vocabulary", parts, size, lambda ids_N: capped(ids_N, size))


def fewer_words(name: str, parts: Parts, size: int, renumbered: Callable[[Any], tuple[Any, int]]) -> Parts:
    """Give the model a vocabulary of `size`; `renumbered` returns the ids in it, and how many are of unknown words.

    Raises ValueError for a size that leaves no word. A vocabulary that is not larger stays as it is.
    """
    if size < 2:
        raise ValueError(f"{name}: size is {size}, and there must be a word beside the unknown one: give 2")
    whole = parts.shape
    if size >= whole.vocabulary:
        parts.notes["unchanged"] = f"the vocabulary has {whole.vocabulary:,} words, no more than {size:,}"
        return parts
    inner, shape = parts.source, whole.model_copy(update={"vocabulary": size})

    def source(parts: Parts) -> Any:
        inner_rows = parts.rows

        def rows(parts: Parts, path: Path) -> Any:
            ids_N, unknown = renumbered(inner_rows(parts, path))
            parts.notes["unknown"] = unknown / max(1, len(ids_N))
            return ids_N

        if hasattr(shape, "parameters"):
            parts.notes["parameters"] = f"{shape.parameters():,} instead of {whole.parameters():,}"
        read = inner(replace(parts, shape=whole, rows=rows))  # drawn ids are drawn from all words
        return replace(read, vocabulary=size)

    return replace(parts, shape=shape, source=source)


def capped(ids_N: Any, size: int) -> tuple[Any, int]:
    """Replace the ids from `size` on, in place unless the array is mapped or read-only; return them and their count.

    Raises ValueError for ids that are not ranked by frequency.
    """
    import numpy as np

    counts_V = np.zeros(0, np.int64)
    for start in range(0, len(ids_N), PIECE):
        of_piece = np.bincount(ids_N[start : start + PIECE], minlength=len(counts_V))
        of_piece[: len(counts_V)] += counts_V
        counts_V = of_piece
    demand_ranked(counts_V, size)
    ids_N = writeable(ids_N)
    for start in range(0, len(ids_N), CHUNK):
        piece = ids_N[start : start + CHUNK]
        piece[piece >= size] = UNKNOWN
    return ids_N, int(counts_V[size:].sum())


def demand_ranked(counts_V: Any, size: int) -> None:
    """Raise ValueError where the ids below `size` come much less often than as many of the most frequent."""
    import numpy as np

    rows = max(1, counts_V.sum())
    stay, most = counts_V[:size].sum() / rows, np.sort(counts_V)[-size:].sum() / rows
    if stay < RANKED * most:
        raise ValueError(
            f"capped_vocabulary: the ids below {size:,} are {stay:.0%} of the corpus, and its most frequent {size:,} "
            f"are {most:.0%}: these ids are not ranked by frequency; take streaming_vocabulary, which counts them"
        )


def writeable(ids_N: Any) -> Any:
    """Return ids that may be changed: a copy of those that are mapped or read-only."""
    import numpy as np

    mapped = isinstance(ids_N, np.memmap)
    ids_N = np.asarray(ids_N)
    return ids_N.copy() if mapped or not ids_N.flags.writeable else ids_N


def holds(extent: Extent, size: int = 10000) -> Holding:
    counting = 8 * min(extent.rows, PIECE) + 2 * 8 * extent.values
    return Holding(making=max(counting, 2 * min(extent.rows, CHUNK)))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "capped_vocabulary",
            rewrites=("source",),
            calls=("add_positions",),  # the decoder's own: the sizes of other models are set before the shape is read
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            probe={"size": 31},
            feeds="other",
            data="tokens",
            holds=holds,
            conflicts=dict.fromkeys(
                ("mapped", "pread", "reservoir", "streaming"),
                "it changes the ids, for which all of them are read into memory: leave one of the two out",
            ),
        )
    ]
