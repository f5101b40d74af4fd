"""Attention for one document after the other in torch."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from harness import Parts


def by_document(parts: Parts, x_1T2: torch.Tensor) -> Parts:
    """Let tokens stand where they are in their document, and attend to it alone."""
    attended = parts.attend
    lengths = lengths_of(x_1T2)

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
