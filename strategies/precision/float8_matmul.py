"""Multiply in 8 bits with a scale for each tensor, and keep the inputs of products so; pay with 3 bits of precision.

Emulated, so that it runs anywhere: both factors of each product with a weight are rounded to float8 (4 bits of exponent
and 3 of mantissa; gradients 5 and 2), widened again and multiplied as before, with sums in the working type. What a
product saves for its backward pass stays in 8 bits, a quarter of float32; the weights stay as they are. Peak: a quarter
of what a product saves of its input. In torch each product narrows a copy of its own, so what several share (queries,
keys and values) takes three quarters. A GPU that multiplies float8 itself saves time instead. Attention, norms,
embedding and the classifier are not touched. A scale is the largest absolute value over that of the type. Sources:
Micikevicius et al., "FP8 Formats for Deep Learning" (2022, arXiv:2209.05433); torchao's float8 training.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from harness import Parts, Strategy, hookimpl

FORWARD, BACKWARD = "float8_e4m3fn", "float8_e5m2"
LEAST = 1e-30
"""What the largest value of a tensor of zeros is taken for: a scale of 0 or of a subnormal number divides by 0."""


def on_torch(parts: Parts) -> Parts:
    def linear(parts: Parts, p: Any, name: str, x: Any) -> Any:
        bias = p.get(f"b{name}")
        y = _product().apply(x, p[name])
        return y if bias is None else y + bias

    return replace(parts, linear=linear)


@cache
def _product() -> Any:
    """Make the function once torch is there."""
    import torch
    from torch.autograd.function import once_differentiable

    def narrowed(x: Any, name: str) -> tuple[Any, Any]:
        """Return a tensor in 8 bits, and what to multiply it by."""
        dtype = getattr(torch, name)
        largest = x.detach().abs().amax().float().clamp(min=LEAST)
        scale = largest / torch.finfo(dtype).max
        return (x / scale).to(dtype), scale

    def widened(narrow: tuple[Any, Any], dtype: Any) -> Any:
        return narrow[0].to(dtype) * narrow[1].to(dtype)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            own = narrowed(x, FORWARD)
            ctx.save_for_backward(w, *(own if ctx.needs_input_grad[1] else ()))
            return widened(own, x.dtype) @ widened(narrowed(w, FORWARD), x.dtype)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, upstream: Any) -> Any:
            w, *own = ctx.saved_tensors
            g = widened(narrowed(upstream, BACKWARD), upstream.dtype)
            for_x, for_w = ctx.needs_input_grad
            of_x = g @ widened(narrowed(w, FORWARD), upstream.dtype).T if for_x else None
            if not for_w:
                return of_x, None
            x = widened((own[0], own[1]), upstream.dtype)
            return of_x, x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])

    return Product


def on_jax(parts: Parts) -> Parts:
    import jax
    import jax.numpy as jnp

    def narrowed(x: Any, name: str) -> tuple[Any, Any]:
        """Return an array in 8 bits, and what to multiply it by."""
        dtype = jnp.dtype(name)
        largest = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), LEAST)
        scale = largest / float(jnp.finfo(dtype).max)
        return (x / scale).astype(dtype), scale

    def widened(narrow: tuple[Any, Any], dtype: Any) -> Any:
        return narrow[0].astype(dtype) * narrow[1].astype(dtype)

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return forward(x, w)[0]

    def forward(x: Any, w: Any) -> Any:
        own = narrowed(x, FORWARD)
        return widened(own, x.dtype) @ widened(narrowed(w, FORWARD), x.dtype), (own, w)

    def backward(residuals: Any, upstream: Any) -> Any:
        own, w = residuals
        g = widened(narrowed(upstream, BACKWARD), upstream.dtype)
        x = widened(own, upstream.dtype)
        of_w = x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])
        return g @ widened(narrowed(w, FORWARD), upstream.dtype).T, of_w.astype(w.dtype)

    product.defvjp(forward, backward)

    def linear(parts: Parts, p: Any, name: str, x: Any) -> Any:
        bias = p.get(f"b{name}")
        y = product(x, p[name])
        return y if bias is None else y + bias

    return replace(parts, linear=linear)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [
        Strategy(
            "float8_matmul",
            rewrites=("linear",),
            on=on,
            about=__doc__,
            precision="float8",
            conflicts=dict.fromkeys(
                ("float16_autocast", "float16_scaled", "float16_master"),
                "its scales of gradients are below the smallest float16: take bfloat16",
            ),
        )
    ]
