"""Reserve keys and values for all tokens once and write each token in its place; pay for tokens that never come.

Peak: kv = 2 L B G K T numbers from the start, and nothing is copied: a concatenated cache moves all of a layer for
every token, which adds up to the square of T. `capacity` is the number of tokens reserved; 0 takes the length of a row.
StaticCache in transformers works in the same way. In JAX the untouched cache is this one, since compiled arrays cannot
grow: there only `capacity` makes a difference.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs


def on_torch(parts: Parts, capacity: int = 0) -> Parts:
    import torch

    knobs.at_least_0("preallocated_cache", capacity=capacity)

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape, reserved = parts.shape, enough(capacity, tokens)
        size = (shape.layers, 2, batch, reserved, shape.key_heads, shape.head)
        return lambda: torch.empty(size, dtype=like.dtype, device=like.device), appending(reserved)

    return replace(parts, cache=cache)


def appending(reserved: int) -> Callable[..., Any]:
    """Return an `append` that writes in place, into tensors [2, B, T, G, K] of each layer."""

    def append(state: Any, layer: int, position: int, k_BTGK: Any, v_BTGK: Any) -> Any:
        end = within(position + k_BTGK.shape[1], reserved)
        for old, new in zip(state[layer], (k_BTGK, v_BTGK), strict=True):
            old[:, position:end].copy_(new)
        return state, *state[layer][:, :, :end], None

    return append


def on_jax(parts: Parts, capacity: int = 0) -> Parts:
    knobs.at_least_0("preallocated_cache", capacity=capacity)
    inner = parts.cache

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        return inner(parts, batch, enough(capacity, tokens), like)

    return replace(parts, cache=cache)


def enough(capacity: int, tokens: int) -> int:
    """Return the number of tokens to reserve; raise ValueError where it is too small for a row."""
    if 0 < capacity < tokens:
        raise ValueError(
            f"the cache has a capacity of {capacity} tokens and a row has {tokens}: give at least {tokens}"
        )
    return capacity or tokens


def within(end: int, reserved: int) -> int:
    """Check `end` against the reserved tokens and return it: a slice beyond would be empty and accept any values."""
    if end > reserved:
        raise ValueError(f"the cache holds {reserved} tokens, and token {end} is written: reserve more")
    return end


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("preallocated_cache", rewrites=("cache",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
