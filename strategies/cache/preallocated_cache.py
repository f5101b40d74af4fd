"""Reserve keys and values for all tokens once and write each token in its place; pay for those that never come.

Peak: kv = 2 L B G K T numbers from the start, and nothing is copied: a concatenated cache moves all of a layer for
every token, which adds up to the square of T. `capacity` is the number of tokens reserved; 0 takes the length of a row.
As StaticCache in transformers. In JAX the untouched cache is this one, since compiled arrays cannot grow: there only
`capacity` makes a difference.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts, capacity: int = 0) -> Parts:
    import torch

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape, held = parts.shape, enough(capacity, tokens)

        def empty() -> Any:
            return torch.empty(
                (shape.layers, 2, batch, held, shape.key_heads, shape.head), dtype=like.dtype, device=like.device
            )

        def append(kept: Any, layer: int, position: int, k_BTGK: Any, v_BTGK: Any) -> Any:
            end = within(position + k_BTGK.shape[1], held)
            for old, new in zip(kept[layer], (k_BTGK, v_BTGK), strict=True):
                old[:, position:end].copy_(new)
            return kept, *kept[layer][:, :, :end], None

        return empty, append

    return replace(parts, cache=cache)


def on_jax(parts: Parts, capacity: int = 0) -> Parts:
    inner = parts.cache

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        return inner(parts, batch, enough(capacity, tokens), like)

    return replace(parts, cache=cache)


def enough(capacity: int, tokens: int) -> int:
    """Give the number of tokens to reserve; raise ValueError where it is too small for a row."""
    if 0 < capacity < tokens:
        raise ValueError(
            f"the cache has a capacity of {capacity} tokens and a row has {tokens}: give at least {tokens}"
        )
    return capacity or tokens


def within(end: int, held: int) -> int:
    """Give `end`; raise ValueError beyond the last token: a slice there is empty, and an empty one takes anything."""
    if end > held:
        raise ValueError(f"the cache holds {held} tokens, and token {end} is written: reserve more")
    return end


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("preallocated_cache", rewrites=("cache",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
