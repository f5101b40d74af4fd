"""Compute with float16 weights and update float32 masters of them, under a loss scale; pay 2 bytes a weight more.

Peak: the weights that the model computes with take 2 bytes instead of 4, activations half; but the masters stay beside
them all the time, so that a weight takes 6 bytes and not 4 before its gradient and its moments. Moments take 8 bytes,
and gradients 2 as they are made and 4 as they are applied. After each update the masters are rounded into the weights.
The loss scale begins at `scale` and adapts as that of `float16_scaled`: a step with a gradient that is not finite is
skipped and counted (Micikevicius et al., 2018, arXiv:1710.03740, section 3.1). On a CPU without products in float16 its
steps are as slow as those of `float16_scaled`.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, tree
from strategies.precision import _loss_scale


def of_masters(state: Any) -> Any:
    """Return the state that the optimizer takes, whose parameters are the masters."""
    training = {key: value for key, value in _loss_scale.training(state).items() if key != "master"}
    return {**training, "params": state["master"]}


def on_torch(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import torch

    knobs.above_0("float16_master", scale=scale, interval=interval)
    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        weights = tree.mapped(lambda p: p.detach().to(torch.float16).requires_grad_(), state["params"])
        return {**state, "params": weights, "master": state["params"], **_loss_scale.begin_in_torch(scale)}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        value, grads = inner_grad(_loss_scale.scaled(parts, state["scale"]), state, x, y)
        narrow = [leaf for _, leaf in tree.leaves(grads)][::-1]
        grads = tree.mapped(lambda _: None, grads)
        wide = (narrow.pop().to(torch.float32).div_(state["scale"]) for _ in tree.leaves(grads))
        return value / state["scale"], tree.rebuilt(state["params"], wide)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        if "layers" not in grads:
            raise ValueError(
                "float16_master decides by all gradients whether a step has overflowed, and another strategy updates "
                "one tensor at a time: name it after offloaded_moments or mapped_moments, and leave out "
                "sparse_embedding_gradient"
            )
        finite = _loss_scale.is_finite_in_torch(grads)
        scaling = _loss_scale.after_step_in_torch(state, finite, interval)
        if not finite:
            return {**state, **scaling}
        moved = inner_update(parts, of_masters(state), grads)
        with torch.no_grad():
            tree.mapped(lambda weight, master: weight.copy_(master), state["params"], moved["params"])
        return {**moved, "params": state["params"], "master": moved["params"], **scaling}

    return replace(parts, init=init, grad=grad, update=update)


def on_jax(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("float16_master", scale=scale, interval=interval)
    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def narrowed(params: Any) -> Any:
        return jax.tree.map(lambda p: p.astype(jnp.float16), params)

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        masters = state["params"]
        return {**state, "params": narrowed(masters), "master": masters, **_loss_scale.begin_in_jax(scale)}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        value, grads = inner_grad(_loss_scale.scaled(parts, state["scale"]), state, x, y)
        return value / state["scale"], jax.tree.map(lambda g: g.astype(jnp.float32) / state["scale"], grads)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        finite, before = _loss_scale.is_finite_in_jax(grads), of_masters(state)
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner_update(parts, before, grads), before)
        scaling = _loss_scale.after_step_in_jax(state, finite, interval)
        return {**moved, "params": narrowed(moved["params"]), "master": moved["params"], **scaling}

    return replace(parts, init=init, grad=grad, update=update)


RULES = (
    *("adafactor", "adam_mini", "apollo", "galore", "lion", "muon", "soap"),
    *("fused_adamw", "foreach_adamw"),
)
"""Rules of update that take what they find as the weights."""


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "float16_master",
            rewrites=("init", "grad", "update"),
            calls=("init", "grad", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            precision="float16",
            conflicts={
                **_loss_scale.conflicts,
                **dict.fromkeys(("bfloat16", "bfloat16_stochastic"), "its masters would be drawn in bfloat16"),
                **dict.fromkeys(
                    ("bfloat16_autocast", "float32_master"), "each decides the type that products are made in"
                ),
                **dict.fromkeys(
                    ("lora", "qlora", "peft_lora"),
                    "what is frozen stays as wide as it is: name bfloat16 before the adapters",
                ),
                **dict.fromkeys(
                    map("before {}".format, RULES),
                    "its moments would be those of the 16-bit weights, and not of the masters: name it after",
                ),
            },
        )
    ]
