"""Count words in one pass with a bounded number of counters, and keep the `size` most frequent; pay approximate ranks.

Peak: 16 bytes for each of `counters` (0: ten for each word that is kept) and the words of one piece of the corpus,
however many different words there are; counting all takes memory for each. Embedding and head have `size` rows. A word
that comes more often than once in `counters` words is never missed; the others may be. With as many counters as there
are words the result is exact: that of `capped_vocabulary`, whose ids are ranked already, up to ties.

Sources: Misra and Gries, "Finding repeated elements" (1982), in pieces that are merged (Agarwal et al., "Mergeable
summaries", 2012); its counters are those of Space-Saving (Metwally et al., 2005) but for one number. Id 0 is the
unknown word, in the corpus as well. Losses over different vocabularies are not comparable. A vocabulary of `size` words
or fewer stays as it is.
"""

from typing import Any

from harness import Extent, Holding, Parts, Strategy, hookimpl, knobs
from strategies.data.rows.capped_vocabulary import CHUNK, UNKNOWN, fewer_words, writeable


def on_any(parts: Parts, size: int = 10000, counters: int = 0) -> Parts:
    knobs.at_least_0("streaming_vocabulary", counters=counters)
    if 0 < counters < size:
        raise ValueError(f"streaming_vocabulary: {counters} counters cannot rank {size} words: give {size} or more")
    return fewer_words(
        "streaming_vocabulary", parts, size, lambda ids_N: renumbered(ids_N, size, counters or 10 * size)
    )


def renumbered(ids_N: Any, size: int, counters: int) -> tuple[Any, int]:
    """Number the most frequent words from 1 on, all others 0, in place where it may be; return also how many are 0."""
    import numpy as np

    words_W = frequent(ids_N, counters)[: size - 1]
    order_W = np.argsort(words_W)
    sorted_W = words_W[order_W]
    ids_N, unknown = writeable(ids_N), 0
    for start in range(0, len(ids_N), CHUNK):
        piece = ids_N[start : start + CHUNK]
        at = np.searchsorted(sorted_W, piece).clip(max=max(0, len(sorted_W) - 1))
        there = sorted_W[at] == piece if len(sorted_W) else np.zeros(len(piece), bool)
        piece[:] = np.where(there, order_W[at] + 1 if len(sorted_W) else 0, UNKNOWN)
        unknown += int(np.count_nonzero(~there))
    return ids_N, unknown


def frequent(ids_N: Any, counters: int) -> Any:
    """Return the words that have a counter at the end, the most frequent first, of equal ones that of the lower id.

    A piece at a time is counted exactly and added; where more words than counters have a number, the largest number of
    those that must go is subtracted from all.
    """
    import numpy as np

    words_M, counts_M = np.empty(0, np.int64), np.empty(0, np.int64)
    for start in range(0, len(ids_N), CHUNK):
        words_P, counts_P = np.unique(np.asarray(ids_N[start : start + CHUNK], np.int64), return_counts=True)
        words_M, where = np.unique(np.concatenate([words_M, words_P]), return_inverse=True)
        counts_M = np.bincount(where, np.concatenate([counts_M, counts_P]), len(words_M)).astype(np.int64)
        if len(words_M) > counters:
            counts_M = counts_M - np.partition(counts_M, -counters - 1)[-counters - 1]
            words_M, counts_M = words_M[counts_M > 0], counts_M[counts_M > 0]
    words_M, counts_M = words_M[words_M != UNKNOWN], counts_M[words_M != UNKNOWN]
    return words_M[np.lexsort((words_M, -counts_M))]


def holds(extent: Extent, size: int = 10000, counters: int = 0) -> Holding:
    # Of one piece: its ids in 8 bytes, sorted once more, where each has its number; and the counters, twice.
    piece, most = min(extent.rows, CHUNK), counters or 10 * size
    return Holding(making=24 * piece + 2 * 16 * min(most, extent.values or most))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "streaming_vocabulary",
            rewrites=("source",),
            calls=("add_positions",),  # the decoder's own: the sizes of other models are set before the shape is read
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            probe={"size": 31, "counters": 40},
            feeds="other",
            data="tokens",
            holds=holds,
            conflicts={
                **dict.fromkeys(
                    ("mapped", "pread", "reservoir", "streaming"),
                    "it numbers the ids anew, for which all of them are read into memory: leave one of the two out",
                ),
                "document_windows": "it numbers the ids anew, and windows would be cut at another word than `end`",
            },
        )
    ]
