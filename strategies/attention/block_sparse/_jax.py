"""Causal attention to listed blocks of keys in JAX."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def attention(q_BCHK: Any, first: Any, local: int, fixed: int, k_BPSGK: Any, v_BPSGK: Any) -> Any:
    """Attend from the blocks of queries numbered `first` on to `fixed` first blocks and to `local` up to their own.

    The blocks of keys and values are those that any of the queries sees: the fixed ones, and those from
    `first - local + 1` on, where one before the first of all is a stand-in.
    """
    B, P, S, G, K = k_BPSGK.shape
    C, H = q_BCHK.shape[1:3]
    own_NL = fixed + jnp.arange(C // S)[:, None] + jnp.arange(local)
    table_NF = jnp.concatenate([jnp.broadcast_to(jnp.arange(fixed), (C // S, fixed)), own_NL], 1)
    number_NF = jnp.concatenate([jnp.arange(fixed), first - local + 1 + jnp.arange(P - fixed)])[table_NF]
    # A fixed block that is a local one as well is seen once.
    lowest_F = jnp.where(jnp.arange(fixed + local) < fixed, 0, fixed)
    key_NFS = number_NF[..., None] * S + jnp.arange(S)
    query_NS = (first * S + jnp.arange(C)).reshape(-1, S)
    seen_NSFS = (key_NFS[:, None] <= query_NS[..., None, None]) & (number_NF >= lowest_F)[:, None, :, None]

    q = q_BCHK.reshape(B, -1, S, G, H // G, K)
    k, v = (x_BPSGK[:, table_NF].reshape(B, C // S, -1, G, K) for x_BPSGK in (k_BPSGK, v_BPSGK))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bnqgrk,bnsgk->bngrqs", q, k, preferred_element_type=wide) * K**-0.5
    seen = seen_NSFS.reshape(C // S, S, -1)[:, None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bngrqs,bnsgk->bnqgrk", shares, v).reshape(B, C, H, K)


def by_blocks(q_BTHK: Any, k_BTGK: Any, v_BTGK: Any, block: int, local: int, fixed: int, chunk: int) -> Any:
    """Attend some blocks of queries at a time, and recompute in the backward pass.

    The blocks before those of a chunk are carried from chunk to chunk: gradients then go back the same way, where a
    slice of all keys would have one as long as the whole.
    """
    B, T, H, K = q_BTHK.shape
    block = min(block, T)
    count = -(-T // block)
    local, fixed = min(local, count), min(fixed, count)
    together = min(count, max(1, chunk // block))
    turns = -(-count // together)

    def in_blocks(x_BTGK: Any) -> Any:
        padded = jnp.pad(x_BTGK, ((0, 0), (0, turns * together * block - T), (0, 0), (0, 0)))
        return padded.reshape(B, turns, together, block, *x_BTGK.shape[2:]).swapaxes(0, 1)

    q, k, v = (in_blocks(x) for x in (q_BTHK, k_BTGK, v_BTGK))
    first_k, first_v = (jnp.pad(x, ((0, 0), (0, count * block - T), (0, 0), (0, 0))) for x in (k_BTGK, v_BTGK))
    first_k, first_v = (x[:, : fixed * block].reshape(B, fixed, block, *x.shape[2:]) for x in (first_k, first_v))

    @partial(jax.checkpoint, prevent_cse=False)
    def one(before: Any, turn: Any) -> Any:
        q, k, v, first = turn
        k, v = jnp.concatenate([before[0], k], 1), jnp.concatenate([before[1], v], 1)
        keys, values = jnp.concatenate([first_k, k], 1), jnp.concatenate([first_v, v], 1)
        y = attention(q.reshape(B, together * block, H, K), first, local, fixed, keys, values)
        return (k[:, together:], v[:, together:]), y

    nothing = jnp.zeros((B, local - 1, *k.shape[3:]), k.dtype), jnp.zeros((B, local - 1, *v.shape[3:]), v.dtype)
    outputs = lax.scan(one, nothing, (q, k, v, jnp.arange(turns) * together))[1]
    return outputs.swapaxes(0, 1).reshape(B, -1, H, K)[:, :T]
