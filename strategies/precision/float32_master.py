"""Compute in a bfloat16 copy of float32 parameters, and update the originals; pay 2 bytes for each parameter more.

Peak: activations and logits of half the size, a copy of the parameters of 2 bytes each while the gradient is taken, and
gradients of 2 bytes until they are widened one by one. Parameters, moments and the update stay in float32, so small
updates are not lost: the weights do not become smaller, only what is computed from them (Micikevicius et al., 2018,
arXiv:1710.03740). Norms, softmax and the loss stay in float32.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree


def on_torch(parts: Parts) -> Parts:
    import torch

    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        copy = tree.mapped(lambda p: p.detach().to(torch.bfloat16).requires_grad_(), state["params"])
        value, grads = inner(parts, {**state, "params": copy}, x, y)
        del copy
        narrow = [leaf for _, leaf in tree.leaves(grads)][::-1]
        grads = tree.mapped(lambda _: None, grads)
        wide = (narrow.pop().to(p.dtype) for _, p in tree.leaves(state["params"]))
        return value, tree.rebuilt(state["params"], wide)

    return replace(parts, grad=grad)


def on_jax(parts: Parts) -> Parts:
    import jax
    import jax.numpy as jnp

    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        copy = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state["params"])
        value, grads = inner(parts, {**state, "params": copy}, x, y)
        return value, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state["params"])

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [
        Strategy(
            "float32_master",
            rewrites=("grad",),
            calls=("grad",),
            on=on,
            about=__doc__,
            precision="bfloat16",
            conflicts={
                **dict.fromkeys(("bfloat16", "bfloat16_stochastic"), "its masters would be drawn in bfloat16"),
                "float16_autocast": "each decides the type that products are made in",
                **dict.fromkeys(
                    ("lora", "qlora", "peft_lora"),
                    "what is frozen stays as wide as it is: name bfloat16 before the adapters",
                ),
            },
        )
    ]
