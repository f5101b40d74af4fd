"""Lay the documents of a batch end to end in one row, without padding; pay attention for each document apart.

Each document attends to itself alone and its positions begin at 0, so that the loss, a mean over the same targets, is
that of the padded batch. A token carries its position beside its id, x_1T2, where a 0 begins a document: these are the
position ids of padding-free batches (Krell et al., 2021, arXiv:2107.02027). Peak: that of the tokens that are there, so
of the batch whose documents are longest together, in place of B times the longest.

torch calls the attention of the other parts for one document after the other. JAX takes rows of one size, that of the
largest batch, and lays queries, keys and values out as [B, longest] for the attention alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from harness import IGNORED, Documents, Extent, Holding, Parts, Source, Strategy, Windows, hookimpl


def end_to_end(source: Documents, length: int | None = None) -> Windows:
    """Lay documents end to end in rows of a length, or of as many tokens as there are; what is left has position -1."""
    import numpy as np

    lengths_N, firsts_N = source.lengths_N, source.firsts_N

    def size(indices_B: Any) -> tuple[int, int, int]:
        return 1, length or int(lengths_N[indices_B].sum()), 2

    def batch(indices_B: Any) -> tuple[Any, Any]:
        indices_B = source.checked(indices_B)
        x_1T2 = np.zeros(size(indices_B), np.int32)
        x_1T2[..., 1] = -1
        y_1T = np.full(x_1T2.shape[:2], IGNORED, np.int32)
        at = 0
        for index in indices_B:
            rows = slice(at, at + int(lengths_N[index]))
            read = slice(firsts_N[index], firsts_N[index] + lengths_N[index])
            x_1T2[0, rows, 0], x_1T2[0, rows, 1] = source.inputs[read], np.arange(lengths_N[index])
            y_1T[0, rows] = source.targets[read]
            at = rows.stop
        return x_1T2, y_1T

    return Windows(source, batch, size=size)


def rewritten(parts: Parts, windows: Callable[..., Windows], by_document: Callable[..., Parts]) -> Parts:
    """Rewrite the windows, and what reads of a token its id and its position; raise ValueError for an evaluation."""
    if getattr(parts.shape, "evaluations", 0):
        raise ValueError(
            "packed tells documents apart where the gradient is taken, and an evaluation takes none: leave out "
            "`evaluations`, or packed"
        )
    inner, look_up = parts.grad, parts.embed

    def grad(parts: Parts, state: Any, x_1T2: Any, y_1T: Any) -> Any:
        return inner(by_document(parts, x_1T2), state, x_1T2, y_1T)

    def embed(parts: Parts, params: Any, x: Any) -> Any:
        return look_up(parts, params, x[..., 0] if x.ndim == 3 else x)  # adapters are tried on ids alone

    return replace(parts, windows=windows, grad=grad, embed=embed)


def on_torch(parts: Parts) -> Parts:
    from strategies.data.windows.packed._torch import by_document

    def windows(parts: Parts, source: Source) -> Windows:
        assert isinstance(source, Documents)
        return end_to_end(source)

    return rewritten(parts, windows, partial(by_document, replace(parts, windows=windows)))


def on_jax(parts: Parts) -> Parts:
    from strategies.data.windows.packed._jax import by_document

    def windows(parts: Parts, source: Source) -> Windows:
        assert isinstance(source, Documents)
        return end_to_end(source, most(parts, source))

    return rewritten(parts, windows, by_document)


def most(parts: Parts, source: Documents) -> int:
    """Count the tokens of the largest batch there may be: of an epoch, or where each has its own order of any."""
    import numpy as np

    lengths_N = source.lengths_N
    if source.shuffle:
        return int(np.sort(lengths_N)[-source.batch :].sum())
    at, whole = parts.order(parts, source, 0), source.count // source.batch
    return max(int(lengths_N[at(n * source.batch, (n + 1) * source.batch)].sum()) for n in range(whole))


def holds(extent: Extent) -> Holding:
    """Count nothing: a batch is counted already, and this one is smaller."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "packed",
            rewrites=("windows", "grad", "embed"),
            calls=("attend",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            feeds="arranged",
            data="documents",
            holds=holds,
            conflicts={
                **dict.fromkeys(
                    ("ring_attention", "ulysses", "megatron_sequence_parallel"),
                    "documents are told apart in whole rows, and each rank has a stretch of one",
                ),
                **dict.fromkeys(
                    ("sequence_windows", "automatic_windows"),
                    "documents are told apart in whole rows, and windows are cut out of these",
                ),
                "accumulate": "a packed batch is one row, which is not cut",
                "before vocabulary_parallel_loss": "that looks ids up without their positions: leave one out",
                "sparse_embedding_gradient": "that looks ids up without their positions",
                **dict.fromkeys(
                    ("ddp", "zero1", "zero2", "fsdp"), "a packed batch is one row, which would all be one rank's"
                ),
            },
        )
    ]
