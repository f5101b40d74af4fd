"""Attention for one document after the other in torch."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses import FakeTensor

from harness import Documents, Parts, Unpredictable


def by_document(data: Parts, parts: Parts, x_1T2: torch.Tensor) -> Parts:
    """Let tokens stand where they are in their document, and attend to it alone; `data` has the source and windows."""
    attended = parts.attend
    lengths = expected(data, parts, x_1T2.shape[1]) if isinstance(x_1T2, FakeTensor) else lengths_of(x_1T2)

    def attend(parts: Parts, q_1THK: Any, k_1TGK: Any, v_1TGK: Any) -> Any:
        documents = zip(*(each.split(lengths, 1) for each in (q_1THK, k_1TGK, v_1TGK)), strict=True)
        return torch.cat([attended(parts, *each) for each in documents], 1)

    def positions(parts: Parts, tokens: int) -> tuple[slice, ...]:
        return tuple(slice(0, length) for length in lengths)

    return replace(parts, attend=attend, positions=positions)


def lengths_of(x_1T2: torch.Tensor) -> list[int]:
    """Read the lengths of the documents from the positions, each of which begins at 0; waits for a device."""
    with torch._C._DisableTorchDispatch():  # a prediction would answer with made-up numbers
        tokens = x_1T2.tolist()[0]
    starts = [at for at, (_, position) in enumerate(tokens) if position == 0]
    return [stop - start for start, stop in pairwise([*starts, len(tokens)])]


def expected(data: Parts, parts: Parts, tokens: int) -> list[int]:
    """Return the lengths in the first batch of an epoch with so many tokens: a prediction for a GPU has no values."""
    parts = replace(parts, source=data.source, windows=data.windows)
    source = parts.source(parts)
    assert isinstance(source, Documents)
    at = parts.order(parts, source, 0)
    for first in range(0, source.count - source.batch + 1, source.batch):
        lengths = source.lengths_N[at(first, first + source.batch)]
        if lengths.sum() == tokens:
            return [int(length) for length in lengths]
    raise Unpredictable("no batch of an epoch has the documents that lie end to end here: measure it")
