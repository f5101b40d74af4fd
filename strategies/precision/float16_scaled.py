"""Multiply in float16 with a loss scale that adapts; skip the steps whose gradients overflow.

Peak: about half of the activations that matrix products save, and 2 bytes for each parameter that has a 16-bit copy
while the step runs; parameters, moments and updates stay in float32. The scale begins at `scale`, is halved when a
gradient is not finite (that step changes no parameter, no moment and no step count, and is counted), and doubled after
`interval` good
steps in a row, as in torch.amp.GradScaler (Micikevicius et al., 2018, arXiv:1710.03740). Gradients are unscaled
once, before the update sees them. torch multiplies by its autocast; in JAX the parameters are cast within the step.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree

GROWTH, BACKOFF = 2.0, 0.5
OWN = ("scale", "good_steps", "skipped_steps")


def scaled(parts: Parts, scale: Any) -> Parts:
    """Multiply the loss by a scale."""
    inner = parts.loss
    return replace(parts, loss=lambda *args: inner(*args) * scale)


def on_torch(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import torch

    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        return {**inner_init(parts, source), "scale": scale, "good_steps": 0, "skipped_steps": 0}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        with torch.autocast(parts.place.device, torch.float16):
            value, grads = inner_grad(scaled(parts, state["scale"]), state, x, y)
        for _, g in tree.leaves(grads):
            g.div_(state["scale"])
        return value / state["scale"], grads

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        if not all(bool(torch.isfinite(g).all()) for _, g in tree.leaves(grads)):
            skipped = {"good_steps": 0, "skipped_steps": state["skipped_steps"] + 1}
            return {**state, "scale": state["scale"] * BACKOFF, **skipped}
        state = inner_update(parts, state, grads)
        good = state["good_steps"] + 1
        grown = good == interval
        return {**state, "scale": state["scale"] * (GROWTH if grown else 1), "good_steps": 0 if grown else good}

    return replace(parts, init=init, grad=grad, update=update)


def on_jax(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import jax
    import jax.numpy as jnp

    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        zero = jnp.zeros((), jnp.int32)
        scaling = {"scale": jnp.asarray(scale, jnp.float32), "good_steps": zero, "skipped_steps": zero + 0}
        return {**inner_init(parts, source), **scaling}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        half = jax.tree.map(lambda p: p.astype(jnp.float16), state["params"])
        value, grads = inner_grad(scaled(parts, state["scale"]), {**state, "params": half}, x, y)
        return value / state["scale"], jax.tree.map(lambda g: g.astype(jnp.float32) / state["scale"], grads)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        training = {key: value for key, value in state.items() if key not in OWN}
        moved = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), inner_update(parts, training, grads), training
        )
        good = jnp.where(finite, state["good_steps"] + 1, 0)
        grown = good == interval
        factor = jnp.where(finite, jnp.where(grown, GROWTH, 1.0), BACKOFF)
        skipped = state["skipped_steps"] + (1 - finite.astype(jnp.int32))
        own = {"scale": state["scale"] * factor, "good_steps": jnp.where(grown, 0, good), "skipped_steps": skipped}
        return {**moved, **own}

    return replace(parts, init=init, grad=grad, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "float16_scaled",
            rewrites=("init", "grad", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            precision="float16",
        )
    ]
