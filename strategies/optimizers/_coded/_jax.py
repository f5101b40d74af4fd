"""Adam with coded moments in JAX: a loop over slices that carries parameters, codes and scales."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from harness import Parts, optimizers
from strategies.optimizers import _coded
from strategies.optimizers._coded import Codes


def begin(codes: Codes, p: Any, name: str, signed: bool, least: int) -> Any:
    """Make one moment of a tensor, or of each layer's: codes and scales of zeros, or where it is small float32."""
    lead = p.shape[:1] if optimizers.of_layers(name) else ()
    size = math.prod(p.shape[len(lead) :])
    if size < least:
        return jnp.zeros(p.shape, jnp.float32)
    blocks = -(-size // codes.block)
    packed = jnp.full((*lead, blocks, codes.bytes_of_block), codes.zero(signed), jnp.uint8)
    return {"codes": packed, "scale": jnp.zeros((*lead, blocks), jnp.float32)}


def update(codes: Codes, parts: Parts, state: Any, grads: Any) -> Any:
    """Apply the gradients."""
    rate, decay = parts.shape.learning_rate, parts.shape.weight_decay

    def move(p: Any, g: Any, m: Any, v: Any) -> Any:
        return optimizers.adamw_in_jax(p, g.astype(jnp.float32), m, v, state["steps"] + 1, rate, decay)

    return optimizers.moved(state, grads, ("first", "second"), partial(_whole, codes, move))


def _whole(codes: Codes, move: Any, p: Any, g: Any, first: Any, second: Any) -> Any:
    """Move a tensor and its moments, slice by slice."""
    if not isinstance(first, dict):
        return move(p, g, first, second)
    p_N, g_N = p.reshape(-1), g.reshape(-1)
    block, size = codes.block, _coded.SLICE

    def slice_of(at: Any, n: int, carry: Any) -> Any:
        """Move `n` elements from `at` on, the codes included."""
        p_N, first, second = carry
        row, rows, padding = at // block, -(-n // block), -n % block
        m, v = (
            widened(codes, cut(of["codes"], row, rows), cut(of["scale"], row, rows), signed)
            for of, signed in ((first, True), (second, False))
        )
        p_n, m, v = move(jnp.pad(cut(p_N, at, n), (0, padding)), jnp.pad(cut(g_N, at, n), (0, padding)), m, v)
        p_N = jax.lax.dynamic_update_slice_in_dim(p_N, p_n[:n], at, 0)
        return p_N, put(first, narrow(codes, m, True), row), put(second, narrow(codes, v, False), row)

    count = p_N.size // size
    carry = (p_N, first, second)
    if count:
        carry = jax.lax.fori_loop(0, count, lambda at, carry: slice_of(at * size, size, carry), carry)
    if p_N.size % size:
        carry = slice_of(count * size, p_N.size % size, carry)
    return carry[0].reshape(p.shape), *carry[1:]


def cut(array: Any, at: Any, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, at, size)


def put(moment: Any, new: Any, row: Any) -> Any:
    return {key: jax.lax.dynamic_update_slice_in_dim(moment[key], new[key], row, 0) for key in moment}


def widened(codes: Codes, packed: Any, scale: Any, signed: bool) -> Any:
    """Look the codes up."""
    if codes.bits == 4:
        packed = jnp.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return (jnp.asarray(codes.levels(signed))[packed.astype(jnp.int32)] * scale[:, None]).reshape(-1)


def narrow(codes: Codes, values: Any, signed: bool) -> Any:
    """Compute the codes and scales of a slice; a block of zeros has scale 0."""
    values = values.reshape(-1, codes.block)
    scale = jnp.abs(values).max(1)
    of_one = values / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[:, None]
    each = jnp.searchsorted(jnp.asarray(codes.middles(signed)), of_one)
    each = jnp.maximum(each, 0 if signed else codes.least_second).astype(jnp.uint8)
    return {"codes": each if codes.bits == 8 else each[:, ::2] | each[:, 1::2] << 4, "scale": scale}
