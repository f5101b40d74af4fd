"""Keep keys and values as 8-bit integers, scaled for each token and head; pay about 0.6 % error and their widening.

Peak: kv / 4 of float32 and a scale of 4 bytes for every K numbers; beside them one layer, kv / L, is wide while
attention reads it. A number is round(127 x / max |x|) with the maximum of its token and head; with one scale for a
whole tensor, a single large row would flatten all others. Sources: KIVI (Liu et al., 2024, arXiv:2402.02750),
QuantizedCache in transformers; both scale keys by channel.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.cache.preallocated_cache import within

STEPS = 127


def on_torch(parts: Parts) -> Parts:
    import torch

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape = parts.shape
        size = (shape.layers, 2, batch, tokens, shape.key_heads)

        def empty() -> Any:
            numbers = torch.empty((*size, shape.head), dtype=torch.int8, device=like.device)
            scales = torch.empty((*size, 1), dtype=torch.float32, device=like.device)
            # One buffer for all layers: a new one for each token, a little longer every time, would leave holes.
            return numbers, scales, torch.empty((*size[1:], shape.head), dtype=like.dtype, device=like.device)

        def append(state: Any, layer: int, position: int, k_BTGK: Any, v_BTGK: Any) -> Any:
            end = within(position + k_BTGK.shape[1], tokens)
            (numbers, scales), wide = (each[layer] for each in state[:2]), state[2][:, :, :end]
            for index, new in enumerate((k_BTGK.float(), v_BTGK.float())):
                scale = new.abs().amax(-1, keepdim=True) / STEPS
                scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros would be 0 / 0
                numbers[index, :, position:end] = (new / scale).round().to(torch.int8)
                scales[index, :, position:end] = scale
            torch.mul(numbers[:, :, :end], scales[:, :, :end], out=wide)
            return state, *wide, None

        return empty, append

    return replace(parts, cache=cache)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp
    from jax import lax

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape = parts.shape
        size = (shape.layers, 2, batch, tokens, shape.key_heads)

        def empty() -> Any:
            return jnp.zeros((*size, shape.head), jnp.int8), jnp.zeros((*size, 1), jnp.float32)

        def append(state: Any, layer: Any, position: Any, k_BTGK: Any, v_BTGK: Any) -> Any:
            end = position + k_BTGK.shape[1]
            if isinstance(end, int):
                within(end, tokens)
            new = jnp.stack([k_BTGK, v_BTGK]).astype(jnp.float32)
            scale = jnp.abs(new).max(-1, keepdims=True) / STEPS
            scale = jnp.where(scale > 0, scale, 1.0)  # a row of zeros would be 0 / 0
            stored = (jnp.round(new / scale).astype(jnp.int8), jnp.where(end <= tokens, scale, jnp.nan))
            numbers, scales = state = tuple(
                lax.dynamic_update_slice(old, each[None], (layer, 0, 0, position, 0, 0))
                for old, each in zip(state, stored, strict=True)
            )
            numbers, scales = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in (numbers, scales))
            stop = end if isinstance(end, int) else tokens
            k, v = (numbers[:, :, :stop] * scales[:, :, :stop]).astype(like.dtype)
            return state, k, v, None

        return empty, append

    return replace(parts, cache=cache)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "int8_cache", rewrites=("cache",), on={"torch": on_torch, "jax": on_jax}, about=__doc__, precision="int8"
        )
    ]
