"""Matrices of 4 bits in JAX."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from harness import Parts
from strategies.adapters.qlora import BLOCK, LARGEST, LEVELS, OF_PARTS, OUTER, is_matrix, wide


def quantised(parts: Parts) -> Parts:
    """Draw the matrices of layers in 4 bits, and widen each for its product alone."""
    inner_draw, inner_linear = parts.draw, parts.linear

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        if not is_matrix(name, shape):
            return value
        if any(jax.typeof(value).sharding.spec):
            raise ValueError(OF_PARTS)
        return packed_layers(value)

    def linear(parts: Parts, p: Any, name: str, x: Any) -> Any:
        key = wide(p, name)
        if not isinstance(p[key], dict):
            return inner_linear(parts, p, name, x)

        def product(matrix: Any, x: Any) -> Any:  # under autocast x is narrow, and decides
            return inner_linear(parts, {**p, key: widened(matrix).astype(x.dtype)}, name, x)

        return jax.checkpoint(product, prevent_cse=False)(p[key], x)

    return replace(parts, draw=draw, linear=linear)


@jax.jit
def packed_layers(matrices: Any) -> Any:
    """Round the matrices of all layers, one after the other; as one program, since each one stays in memory."""
    return jax.lax.map(packed, matrices)


def packed(matrix: Any) -> Any:
    """Round a matrix to 4 bits, as in torch."""
    numbers = jnp.pad(matrix.astype(jnp.float32).ravel(), (0, -matrix.size % BLOCK)).reshape(-1, BLOCK)
    largest = jnp.abs(numbers).max(1)
    mean = largest.mean()
    blocks = jnp.pad(largest - mean, (0, -len(largest) % OUTER)).reshape(-1, OUTER)
    outer = jnp.maximum(jnp.abs(blocks).max(1), 1e-30)
    scales = (blocks / outer[:, None] * LARGEST).astype(jnp.float8_e4m3fn).ravel()[: len(largest)]
    scaled = numbers / jnp.maximum(_scales(scales, outer, mean), 1e-30)[:, None]
    levels = jnp.asarray(LEVELS, jnp.float32)
    codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, scaled.ravel()[: matrix.size]).astype(jnp.uint8)
    pairs = codes.reshape(*matrix.shape[:-1], -1, 2)
    return {
        "codes": pairs[..., 0] << 4 | pairs[..., 1],
        "scales": scales,
        "outer": outer,
        "mean": mean,
        "like": jnp.zeros(1, matrix.dtype),
    }


def _scales(scales: Any, outer: Any, mean: Any) -> Any:
    """Widen the scales of blocks."""
    return scales.astype(jnp.float32) / LARGEST * jnp.repeat(outer, OUTER)[: len(scales)] + mean


def widened(matrix: Any) -> Any:
    """Return the matrix in the type that it was drawn in."""
    codes, dtype = matrix["codes"], matrix["like"].dtype
    levels = jnp.asarray(LEVELS, jnp.float32).astype(dtype)
    numbers = levels[jnp.stack([codes >> 4, codes & 15], -1)].ravel()
    scales = _scales(matrix["scales"], matrix["outer"], matrix["mean"]).astype(dtype)
    return (numbers * jnp.repeat(scales, BLOCK)[: numbers.size]).reshape(*codes.shape[:-1], -1)
