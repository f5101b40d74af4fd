"""Updates within the backward pass of JAX: a loop over the layers that carries parameters and moments.

State entries that are split by layer (parameters, moments) are dicts with a key "layers"; all others, such as the
count of steps, belong to the whole.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from harness import Parts
from strategies.optimizers.update_in_backward import REFUSED, watched

OF_LAYERS = ("attend", "positions", "linear", "rotary", "mix", "feed", "block")
"""Parts that layers call: they run here before the gradient is asked for, and anew after it."""


def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
    """Run one step: forward, keeping each layer's input; the gradient of what follows the layers; then layer by layer.

    What the embedding does not read is updated before the loop, and what it reads after, when its gradient is whole.
    """
    params = state["params"]
    if "frozen" in state:
        raise ValueError(REFUSED.format(how="trains a part of the parameters"))
    if parts.ranks > 1 and parts.division.gradients_reduced:
        raise ValueError(REFUSED.format(how="sums gradients over ranks"))
    outer = {name: value for name, value in params.items() if name != "layers"}
    first_BTD = parts.embed(parts, outer, x)
    last_BTD, inputs_LBTD = jax.lax.scan(
        lambda x_BTD, p: (layer(parts, jax.tree.map(lambda leaf: leaf[None], p), x_BTD), x_BTD),
        first_BTD,
        params["layers"],
    )
    value, grads = parts.grad(
        without_layers(parts, x, last_BTD), {**state, "params": {**outer, "layers": last_BTD}}, x, y
    )
    g_BTD = grads.pop("layers")

    early = {name for name in outer if name not in read_by_embed(parts, outer, x)}
    state = updated(parts, state, {name: grads[name] for name in early})
    g_BTD, state = backward_through_layers(parts, state, inputs_LBTD, g_BTD)

    _, backward = jax.vjp(lambda outer: parts.embed(parts, outer, x), outer)
    late = {name: jax.tree.map(jnp.add, grads[name], g) for name, g in backward(g_BTD)[0].items() if name not in early}
    return updated(parts, state, late, counts=True), value


def layer(parts: Parts, ps: Any, x_BTD: Any) -> Any:
    """Run a stack of one layer, whose parameters still have their leading dimension."""
    return parts.stack(parts, ps, x_BTD)


def backward_through_layers(parts: Parts, state: Any, inputs_LBTD: Any, g_BTD: Any) -> tuple[Any, Any]:
    """From the last layer to the first compute it again, take its gradient and update it in the place of the old."""

    def turn(at: Any, carry: Any) -> Any:
        g_BTD, split = carry
        number = len(inputs_LBTD) - 1 - at
        now = jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(each, number, 1), split)
        _, backward = jax.vjp(lambda ps, x_BTD: layer(parts, ps, x_BTD), now["params"]["layers"], inputs_LBTD[number])
        of_layer, g_BTD = backward(g_BTD)
        # A branch that is always taken keeps the update a unit: fused with the writing, it copies all layers.
        new = jax.lax.cond(
            number >= 0,
            lambda now, of_layer: changed(parts.update(parts, {**state, **now}, {"layers": of_layer}), now),
            lambda now, of_layer: now,
            now,
            of_layer,
        )
        split = jax.tree.map(
            lambda each, value: jax.lax.dynamic_update_slice_in_dim(each, value, number, 0), split, new
        )
        return g_BTD, split

    split = {key: {"layers": value["layers"]} for key, value in state.items() if is_split(value)}
    g_BTD, split = jax.lax.fori_loop(0, len(inputs_LBTD), turn, (g_BTD, split))
    return g_BTD, {**state, **{key: {**state[key], **value} for key, value in split.items()}}


def changed(new: Any, now: Any) -> Any:
    """Keep of an updated state what the loop carries."""
    return {key: {"layers": new[key]["layers"]} for key in now}


def without_layers(parts: Parts, x: Any, last_BTD: Any) -> Parts:
    """Replace the layers by their last output, as a parameter."""

    def stack(inside: Parts, ps: Any, x: Any) -> Any:
        for name in OF_LAYERS:
            if getattr(inside, name) is not getattr(parts, name):
                raise ValueError(REFUSED.format(how=f"gives the layers another '{name}' within the gradient"))
        if ps.dtype != last_BTD.dtype:
            raise ValueError(REFUSED.format(how="casts the parameters"))
        return ps

    return replace(watched(replace(parts, embed=lambda *_: None), x), stack=stack)


def read_by_embed(parts: Parts, outer: Any, x: Any) -> set[str]:
    """Name the parameters that the embedding reads: their gradient is complete only at the very end."""
    names: set[str] = set()
    for name, value in outer.items():
        program = jax.make_jaxpr(lambda p, name=name: parts.embed(parts, {**outer, name: p}, x))(value).jaxpr
        own = {id(variable) for variable in program.invars}
        if any(id(variable) in own for equation in program.eqns for variable in equation.invars):
            names.add(name)
    return names


def updated(parts: Parts, state: Any, grads: Any, counts: bool = False) -> Any:
    """Update the parameters outside of the layers that have a gradient; only the last update of a step counts it."""
    if not grads:
        return state
    some = {key: {name: value[name] for name in grads} if is_split(value) else value for key, value in state.items()}
    new = parts.update(parts, some, grads)
    whole = {key: {**state[key], **new[key]} if is_split(state[key]) else new[key] for key in state}
    return whole if counts else {**whole, **{k: v for k, v in state.items() if not is_split(v)}}


def is_split(value: Any) -> bool:
    """Return whether an entry of the state holds something for each parameter."""
    return isinstance(value, dict) and "layers" in value
