"""Allocate blocks of a few tokens as they are filled, and no others; pay a gather of a layer per token.

Peak: kv rounded up to whole blocks, and kv / L of the layer that attention reads, which needs its keys in one piece.
The table of a layer lists its blocks in order; they are freed when the next row begins. PagedAttention (Kwon et al.,
2023, arXiv:2309.06180) reads the blocks where they are, by a kernel of its own, and shares them among requests. torch
only: in JAX, where arrays cannot grow, all blocks would be there from the start.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts, block: int = 16) -> Parts:
    import torch

    if block < 1:
        raise ValueError(f"paged_cache: block is {block}, and a block holds at least 1 token")

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape = parts.shape
        size = (2, batch, block, shape.key_heads, shape.head)

        def empty() -> Any:
            return [[] for _ in range(shape.layers)]

        def append(state: Any, layer: int, position: int, k_BTGK: Any, v_BTGK: Any) -> Any:
            table, end = state[layer], position + k_BTGK.shape[1]
            del table[-(-position // block) :]  # the blocks of the row before
            while position < end:
                if position == len(table) * block:
                    table.append(torch.empty(size, dtype=like.dtype, device=like.device))
                first = position % block
                count = min(block - first, end - position)
                for old, new in zip(table[-1], (k_BTGK, v_BTGK), strict=True):
                    start = position - end + new.shape[1]
                    old[:, first : first + count].copy_(new[:, start : start + count])
                position += count
            return state, *torch.cat(table, 2)[:, :, :end], None

        return empty, append

    return replace(parts, cache=cache)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("paged_cache", rewrites=("cache",), on={"torch": on_torch}, about=__doc__, probe={"block": 5})]
