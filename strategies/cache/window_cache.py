"""Keep the last `window` tokens and the first `sinks` tokens in a ring; pay all links to the tokens between.

Peak: kv (window + sinks) / T. While a prompt of P tokens is read, also the keys and values of one layer and a mask of
its P x P links: long prompts cost more than the ring saves. A token sees itself, the `window - 1` tokens before it, and
the sinks; so do the tokens of the prompt, so that the answer is that of attention with this mask over whole rows. Keys
keep their positions. Sources: sliding windows (Beltagy et al., 2020, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825),
sinks (StreamingLLM, Xiao et al., 2023, arXiv:2309.17453, which gives the keys new positions instead).
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts, window: int = 1024, sinks: int = 4) -> Parts:
    import torch

    refuse(window, sinks)

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape, ring = parts.shape, min(window, tokens)
        first = min(sinks, tokens)

        def empty() -> Any:
            size = (shape.layers, 2, batch, first + ring, shape.key_heads, shape.head)
            return torch.zeros(size, dtype=like.dtype, device=like.device)

        def append(state: Any, layer: int, position: int, k_BTGK: Any, v_BTGK: Any) -> Any:
            new, end = torch.stack([k_BTGK, v_BTGK]), position + k_BTGK.shape[1]
            slots_S = torch.arange(first + ring, device=like.device)
            query_T = torch.arange(position, end, device=like.device)
            before = state[layer].clone() if position and end - position > 1 else None
            staying_T = [at for at in range(position, end) if at < first or at >= end - ring]
            places = [at if at < first else first + (at - first) % ring for at in staying_T]
            if end - position == 1:  # a number is no list of numbers, which would be copied to the device
                state[layer][:, :, places[0]] = new[:, :, 0]
                key_S = positions(slots_S, end, first, ring, torch.where)
                return state, *state[layer], seen(query_T, key_S, window, sinks)
            state[layer][:, :, places] = new[:, :, [at - position for at in staying_T]]
            keys, key_S = new if before is None else torch.cat([before, new], 2), query_T
            if position:
                key_S = torch.cat([positions(slots_S, position, first, ring, torch.where), query_T])
            return state, *keys, seen(query_T, key_S, window, sinks)

        return empty, append

    return replace(parts, cache=cache)


def on_jax(parts: Parts, window: int = 1024, sinks: int = 4) -> Parts:
    import jax.numpy as jnp
    from jax import lax

    refuse(window, sinks)

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape, ring = parts.shape, min(window, tokens)
        first = min(sinks, tokens)

        def empty() -> Any:
            return jnp.zeros((shape.layers, first + ring, 2, batch, shape.key_heads, shape.head), like.dtype)

        def append(state: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
            new_T = jnp.stack([k_BTGK, v_BTGK]).transpose(2, 0, 1, 3, 4)
            count = len(new_T)
            end = position + count
            slots_S, query_T = jnp.arange(first + ring), position + jnp.arange(count)
            places_T = jnp.where(query_T < first, query_T, first + (query_T - first) % ring)
            if count == 1:
                state = lax.dynamic_update_slice(state, new_T[None], (layer, places_T[0], 0, 0, 0, 0))
                keys_S = lax.dynamic_index_in_dim(state, layer, keepdims=False)
                key_S = positions(slots_S, end, first, ring, jnp.where)
            else:
                before_S = lax.dynamic_index_in_dim(state, layer, keepdims=False)
                staying_T = (query_T < first) | (query_T >= end - ring)
                nowhere_T = jnp.where(staying_T, places_T, first + ring)
                state = state.at[layer, nowhere_T].set(new_T, mode="drop")
                at_start = isinstance(position, int) and position == 0
                keys_S = new_T if at_start else jnp.concatenate([before_S, new_T])
                key_S = jnp.concatenate([positions(slots_S, position, first, ring, jnp.where), query_T])
                key_S = query_T if at_start else key_S
            k, v = keys_S.transpose(1, 2, 0, 3, 4)
            return state, k, v, seen(query_T, key_S, window, sinks)

        return empty, append

    return replace(parts, cache=cache)


def positions(slots_S: Any, written: Any, first: int, ring: int, where: Any) -> Any:
    """Compute the position of the token in each slot after `written` tokens; negative where there is none."""
    latest_S = slots_S + (written - 1 - slots_S) // ring * ring
    in_ring_S = where(latest_S >= slots_S, latest_S, -1)
    return where(slots_S < first, where(slots_S < written, slots_S, -1), in_ring_S)


def seen(query_T: Any, key_S: Any, window: int, sinks: int) -> Any:
    """Compute which keys [T, S] each query sees: no later ones, only the window and the sinks."""
    query_T = query_T[:, None]
    return (key_S >= 0) & (key_S <= query_T) & ((key_S < sinks) | (key_S > query_T - window))


def refuse(window: int, sinks: int) -> None:
    """Raise ValueError for an empty window or a negative number of sinks."""
    if window < 1 or sinks < 0:
        raise ValueError(f"window_cache: window is {window} and sinks {sinks}: give at least 1 and 0")


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [
        Strategy(
            "window_cache", rewrites=("cache",), on=on, about=__doc__, approximate=True, probe={"window": 8, "sinks": 2}
        )
    ]
