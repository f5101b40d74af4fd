"""Reversible layers in JAX, as one `jax.custom_vjp` of scans."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness import Parts
from strategies.activations.reversible import branches


def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
    """Apply all layers to two streams, keeping their last states; return the mean of both."""
    if len(jax.tree.leaves(ps)[0]) < parts.shape.layers:
        raise ValueError(
            "reversible carries two streams through all layers, and another strategy runs the layers one by one, as "
            "update_in_backward and lomo do in JAX: leave out one of the two"
        )
    f, g = branches(parts)
    dtype = x_BTD.dtype
    wide = jnp.promote_types(dtype, jnp.float32)

    def one(streams: Any, p: Any) -> Any:
        first, second = streams
        first = first + f(p, second.astype(dtype))
        return (first, second + g(p, first.astype(dtype))), None

    def undone(branch: Any, p: Any, stream: Any, out: Any, d_out: Any, d_stream: Any) -> Any:
        value, pull = jax.vjp(branch, p, stream.astype(dtype))
        d_p, d_x = pull(d_out.astype(value.dtype))
        return out - value, d_stream + d_x, d_p

    def back(carry: Any, p: Any) -> Any:
        first, second, d_first, d_second = carry
        second, d_first, d_p = undone(g, p, first, second, d_second, d_first)
        first, d_second, d_q = undone(f, p, second, first, d_first, d_second)
        return (first, second, d_first, d_second), [
            one + other
            for one, other in zip(jax.tree.leaves(d_p), jax.tree.leaves(d_q), strict=True)
            if one.dtype != jax.dtypes.float0
        ]

    @jax.custom_vjp
    def run(ps: Any, x_BTD: Any) -> Any:
        return forward(ps, x_BTD)[0]

    def forward(ps: Any, x_BTD: Any) -> Any:
        x_BTD = x_BTD.astype(wide)
        first, second = jax.lax.scan(one, (x_BTD, x_BTD), ps)[0]
        return ((first + second) / 2).astype(dtype), (ps, first, second)

    def backward(residuals: Any, grad_BTD: Any) -> Any:
        ps, first, second = residuals
        half = grad_BTD.astype(wide) / 2
        (_, _, d_first, d_second), sums = jax.lax.scan(back, (first, second, half, half), ps, reverse=True)
        known = iter(sums)

        def gradient(p: Any) -> Any:  # whole numbers, as codes are, have none
            return next(known) if jnp.issubdtype(p.dtype, jnp.inexact) else np.zeros(p.shape, jax.dtypes.float0)

        return jax.tree.map(gradient, ps), (d_first + d_second).astype(dtype)

    run.defvjp(forward, backward)
    return run(ps, x_BTD)
