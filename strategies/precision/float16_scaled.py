"""Multiply in float16 with a loss scale that adapts; skip the steps whose gradients overflow.

Peak: about half of the activations that matrix products save, and 2 bytes for each parameter that has a 16-bit copy
while the step runs; parameters, moments and updates stay in float32. The scale begins at `scale`, is halved when a
gradient is not finite (that step changes no parameter, no moment and no step count, and is counted), and doubled after
`interval` good steps in a row, as in torch.amp.GradScaler (Micikevicius et al., 2018, arXiv:1710.03740). Gradients are
unscaled once, before the update sees them. torch multiplies by its autocast; in JAX the parameters are cast within the
step. On a CPU without products in float16 those of torch take tens of times as long as in float32; JAX widens.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, tree
from strategies.precision import _loss_scale


def on_torch(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import torch

    knobs.above_0("float16_scaled", scale=scale, interval=interval)
    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        return {**inner_init(parts, source), **_loss_scale.begin_in_torch(scale)}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        with torch.autocast(parts.place.device, torch.float16):
            value, grads = inner_grad(_loss_scale.scaled(parts, state["scale"]), state, x, y)
        for _, g in tree.leaves(grads):
            g.div_(state["scale"])
        return value / state["scale"], grads

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        if "layers" not in grads:
            raise ValueError(
                "float16_scaled decides by all gradients whether a step has overflowed, and another strategy updates "
                "one tensor at a time: name it after offloaded_moments or mapped_moments, and leave out "
                "sparse_embedding_gradient"
            )
        finite = _loss_scale.is_finite_in_torch(grads)
        moved = inner_update(parts, state, grads) if finite else state
        return {**moved, **_loss_scale.after_step_in_torch(state, finite, interval)}

    return replace(parts, init=init, grad=grad, update=update)


def on_jax(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("float16_scaled", scale=scale, interval=interval)
    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        return {**inner_init(parts, source), **_loss_scale.begin_in_jax(scale)}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        if "frozen" in state:
            raise ValueError(
                "float16_scaled casts what is trained, and the frozen model would stay wide: name bfloat16 before the "
                "adapters instead"
            )
        half = jax.tree.map(lambda p: p.astype(jnp.float16), state["params"])
        value, grads = inner_grad(_loss_scale.scaled(parts, state["scale"]), {**state, "params": half}, x, y)
        return value / state["scale"], jax.tree.map(lambda g: g.astype(jnp.float32) / state["scale"], grads)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        finite, before = _loss_scale.is_finite_in_jax(grads), _loss_scale.training(state)
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner_update(parts, before, grads), before)
        return {**moved, **_loss_scale.after_step_in_jax(state, finite, interval)}

    return replace(parts, init=init, grad=grad, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "float16_scaled",
            rewrites=("init", "grad", "update"),
            calls=("init", "grad", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            precision="float16",
            conflicts={
                **_loss_scale.conflicts,
                **dict.fromkeys(
                    ("bfloat16", "bfloat16_stochastic", "bfloat16_autocast", "float16_master", "float32_master"),
                    "each decides the type that products are made in",
                ),
            },
        )
    ]
