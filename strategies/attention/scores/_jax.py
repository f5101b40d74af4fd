"""Causal attention over stretches of queries and keys in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def attention(q_BCHK: Any, k_BSGK: Any, v_BSGK: Any, first: Any, start: Any, window: int) -> Any:
    """Attend from the queries at `first` on to the keys at `start` on: those not later, and less than `window` back.

    Keys before position 0 are padding, and hidden.
    """
    B, C, H, K = q_BCHK.shape
    S, G = k_BSGK.shape[1:3]
    wide = jnp.promote_types(q_BCHK.dtype, jnp.float32)
    q = q_BCHK.reshape(B, C, G, H // G, K)
    scores = jnp.einsum("bcgrk,bsgk->bgrcs", q, k_BSGK, preferred_element_type=wide) * K**-0.5
    query, key = first + jnp.arange(C)[:, None], start + jnp.arange(S)
    seen_CS = (key <= query) & (key > query - window) & (key >= 0)
    shares = jax.nn.softmax(jnp.where(seen_CS, scores, -jnp.inf), axis=-1).astype(v_BSGK.dtype)
    return jnp.einsum("bgrcs,bsgk->bcgrk", shares, v_BSGK).reshape(B, C, H, K)


def by_chunks(q_BTHK: Any, k_BTGK: Any, v_BTGK: Any, chunk: int, window: int) -> Any:
    """Attend `chunk` queries at a time to the keys that they can reach, and recompute in the backward pass.

    The stretches of keys have one size, so that one program serves all chunks: keys are padded at both ends.
    """
    B, T, H, K = q_BTHK.shape
    chunk = min(chunk, T)
    count = -(-T // chunk)
    before, after = min(window, T) - 1, count * chunk - T
    q = jnp.pad(q_BTHK, ((0, 0), (0, after), (0, 0), (0, 0))).reshape(B, count, chunk, H, K).swapaxes(0, 1)
    k, v = (jnp.pad(x, ((0, 0), (before, after), (0, 0), (0, 0))) for x in (k_BTGK, v_BTGK))
    reach = before + chunk

    @jax.checkpoint
    def one(q_BCHK: Any, k: Any, v: Any, first: Any) -> Any:
        keys, values = (lax.dynamic_slice_in_dim(x, first, reach, 1) for x in (k, v))
        return attention(q_BCHK, keys, values, first, first - before, window)

    outputs = lax.map(lambda turn: one(turn[0], k, v, turn[1]), (q, jnp.arange(count) * chunk))
    return outputs.swapaxes(0, 1).reshape(B, count * chunk, H, K)[:, :T]
