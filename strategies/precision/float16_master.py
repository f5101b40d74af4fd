"""Compute with float16 weights and update float32 masters of them, under a loss scale; pay 2 bytes a weight more.

Peak: the weights that the model computes with take 2 bytes instead of 4, activations half; but the masters stay beside
them all the time, so that a weight takes 6 bytes and not 4 before its gradient and its moments, which are of 2 and of 8
bytes. After each update the masters are rounded into the weights. The loss scale begins at `scale` and adapts as that
of `float16_scaled`: a step with a gradient that is not finite is skipped and counted (Micikevicius et al., 2018,
arXiv:1710.03740, section 3.1).
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, tree
from strategies.precision.float16_scaled import BACKOFF, GROWTH, scaled

OWN = ("scale", "good_steps", "skipped_steps", "master")


def on_torch(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import torch

    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        weights = tree.mapped(lambda p: p.detach().to(torch.float16).requires_grad_(), state["params"])
        own = {"scale": scale, "good_steps": 0, "skipped_steps": 0, "master": state["params"]}
        return {**state, "params": weights, **own}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        value, grads = inner_grad(scaled(parts, state["scale"]), state, x, y)
        narrow = [leaf for _, leaf in tree.leaves(grads)][::-1]
        grads = tree.mapped(lambda _: None, grads)
        wide = (narrow.pop().to(torch.float32).div_(state["scale"]) for _ in tree.leaves(grads))
        return value / state["scale"], tree.rebuilt(state["params"], wide)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        if not all(bool(torch.isfinite(g).all()) for _, g in tree.leaves(grads)):
            skipped = {"good_steps": 0, "skipped_steps": state["skipped_steps"] + 1}
            return {**state, "scale": state["scale"] * BACKOFF, **skipped}
        training = {key: value for key, value in state.items() if key not in OWN}
        moved = inner_update(parts, {**training, "params": state["master"]}, grads)
        with torch.no_grad():
            for (_, weight), (_, master) in zip(
                tree.leaves(state["params"]), tree.leaves(moved["params"]), strict=True
            ):
                weight.copy_(master)
        good = state["good_steps"] + 1
        grown = good == interval
        own = {"scale": state["scale"] * (GROWTH if grown else 1), "good_steps": 0 if grown else good}
        return {**state, **moved, "params": state["params"], "master": moved["params"], **own}

    return replace(parts, init=init, grad=grad, update=update)


def on_jax(parts: Parts, scale: float = 65536.0, interval: int = 2000) -> Parts:
    import jax
    import jax.numpy as jnp

    inner_init, inner_grad, inner_update = parts.init, parts.grad, parts.update

    def narrowed(params: Any) -> Any:
        return jax.tree.map(lambda p: p.astype(jnp.float16), params)

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        zero = jnp.zeros((), jnp.int32)
        own = {"scale": jnp.asarray(scale, jnp.float32), "good_steps": zero, "skipped_steps": zero + 0}
        return {**state, "params": narrowed(state["params"]), "master": state["params"], **own}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        value, grads = inner_grad(scaled(parts, state["scale"]), state, x, y)
        return value / state["scale"], jax.tree.map(lambda g: g.astype(jnp.float32) / state["scale"], grads)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        training = {key: value for key, value in state.items() if key not in OWN}
        before = {**training, "params": state["master"]}
        moved = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner_update(parts, before, grads), before)
        good = jnp.where(finite, state["good_steps"] + 1, 0)
        grown = good == interval
        factor = jnp.where(finite, jnp.where(grown, GROWTH, 1.0), BACKOFF)
        own = {"scale": state["scale"] * factor, "good_steps": jnp.where(grown, 0, good)}
        own["skipped_steps"] = state["skipped_steps"] + (1 - finite.astype(jnp.int32))
        return {**moved, "params": narrowed(moved["params"]), "master": moved["params"], **own}

    return replace(parts, init=init, grad=grad, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "float16_master",
            rewrites=("init", "grad", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            precision="float16",
        )
    ]
