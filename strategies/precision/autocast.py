"""Multiply in 16 bits within the step, by the framework's own autocast; parameters and updates stay in float32.

Peak: about half of the activations that matrix products save, and 2 bytes for each parameter that has a 16-bit copy
while the step runs. The weights themselves do not become smaller. JAX has no such switch: there the products with the
weights of layers, attention between them, and the product with the classifier get 16-bit inputs, and sums over layers,
norms and the loss stay in float32; what recurrences and selective scans multiply stays as it is.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(dtype: str, parts: Parts) -> Parts:
    import torch

    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        with torch.autocast(parts.place.device, getattr(torch, dtype)):
            return inner(parts, state, x, y)

    return replace(parts, grad=grad)


def on_jax(dtype: str, parts: Parts) -> Parts:
    import jax

    if parts.linear is None:
        raise ValueError(
            f"{dtype}_autocast narrows in JAX what the part 'linear' multiplies, and this model has none: use {dtype}"
        )
    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        linear_, loss_ = parts.linear, parts.loss

        def linear(parts: Parts, p: Any, name: str, x: Any) -> Any:
            narrow = {key: p[key].astype(dtype) for key in (name, f"b{name}") if isinstance(p.get(key), jax.Array)}
            return linear_(parts, {**p, **narrow}, name, x.astype(dtype))  # what adapters multiply comes along

        def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
            return loss_(parts, x_BTD.astype(dtype), w_VD.astype(dtype), y_BT)

        return inner(replace(parts, linear=linear, loss=loss), state, x, y)

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    more = {
        "bfloat16": "Multiply in bfloat16 within the step; keep parameters and updates in float32.",
        "float16": "Multiply in float16 within the step without a loss scale; gradients below 6e-8 become zero.",
    }
    return [
        Strategy(
            f"{dtype}_autocast",
            rewrites=("grad",),
            calls=("grad",),
            on={"torch": partial(on_torch, dtype), "jax": partial(on_jax, dtype)},
            about=f"{line}\n\n{__doc__}",
            precision=dtype,
            conflicts=dict.fromkeys(
                ("bfloat16_autocast", "bfloat16", "bfloat16_stochastic") if dtype == "float16" else (),
                "each decides the type that products are made in",
            ),
        )
        for dtype, line in more.items()
    ]
