"""What optimizers share: the rule of AdamW, the state of each parameter alone, and each tensor moved by itself."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from harness.contract.toolkit import trees

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


def adamw_in_torch(p: Any, g: Any, m: Any, v: Any, steps: int, rate: float, decay: float) -> None:
    """Move one tensor and its two moments in place by the `steps`-th step of AdamW (arXiv:1711.05101)."""
    p.mul_(1 - rate * decay)
    m.lerp_(g.to(m.dtype), 1 - BETA_1)
    v.mul_(BETA_2).addcmul_(g, g, value=1 - BETA_2)
    scale = v.sqrt().div_(math.sqrt(1 - BETA_2**steps)).add_(EPSILON)
    p.addcdiv_(m, scale, value=-rate / (1 - BETA_1**steps))


def adamw_in_jax(p: Any, g: Any, m: Any, v: Any, steps: Any, rate: float, decay: float) -> tuple[Any, Any, Any]:
    """Return one array and its two moments after the `steps`-th step of AdamW, each in its own type."""
    import jax.numpy as jnp

    count = steps.astype(jnp.promote_types(p.dtype, jnp.float32))
    first = m + (1 - BETA_1) * (g - m)
    second = BETA_2 * v + (1 - BETA_2) * g * g
    scale = jnp.sqrt(second) / jnp.sqrt(1 - BETA_2**count) + EPSILON
    new = p * (1 - rate * decay) - rate / (1 - BETA_1**count) * (first / scale)
    return new.astype(p.dtype), first.astype(m.dtype), second.astype(v.dtype)


def one_by_one(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the state of each parameter alone, with its dotted name: an `update` can be called with it."""
    moments: list[Any] = []
    if state["moments"] is not None:
        trees.mapped(lambda _, of_tensor: moments.append(of_tensor), state["params"], state["moments"])
    for at, (name, p) in enumerate(trees.leaves(state["params"])):
        yield name, {**state, "params": {name: p}, "moments": {name: moments[at]} if moments else None}


def joined(state: Any, alone: dict[str, Any]) -> Any:
    """Put the states of all parameters together again."""
    names = [name for name, _ in trees.leaves(state["params"])]
    whole = {**alone[names[0]]}
    for key in ("params", "moments"):
        values = [alone[name][key] for name in names]
        if values[0] is not None:
            leaves = (value[name] for value, name in zip(values, names, strict=True))
            whole[key] = trees.rebuilt(state["params"], leaves)
    return whole


def of_layers(name: str) -> bool:
    """Return whether a leaf of that name belongs to the layers: in JAX it stacks their tensors, one after the other."""
    return name.startswith("layers.")


def moved(state: Any, grads: Any, keys: tuple[str, ...], move: Callable[..., Any], *facts: Any) -> Any:
    """Move each tensor, or each layer's, by `move(p, g, *moments, *facts) -> (p, *moments)`, count the step (in JAX).

    `keys` name the moments in the state: `move` receives and returns those of its tensor, in this order. `facts` are
    trees of what else it receives of a tensor, the same for all layers.
    """
    params = state["params"]
    moments = (state[key] for key in keys)

    def of_tensor(p: Any, name: str, g: Any, *rest: Any) -> Any:
        known = rest[len(keys) :]
        return _by_layer(lambda *of: move(*of, *known), name, p, g, *rest[: len(keys)])

    new = trees.mapped(of_tensor, params, trees.names(params), grads, *moments, *facts)
    parted = {key: trees.mapped(lambda _, of, at=at: of[at], params, new) for at, key in enumerate(("params", *keys))}
    return {**state, **parted, "steps": state["steps"] + 1}


def _by_layer(move: Callable[..., Any], name: str, p: Any, g: Any, *moments: Any) -> Any:
    """Call `move` for a tensor, or in turn for that of each layer, whose result replaces the old."""
    import jax

    if not of_layers(name):
        return move(p, g, *moments)

    def turn(layer: Any, carried: Any) -> Any:
        old, *rest = jax.tree.map(lambda each: each[layer], carried)
        new = tuple(move(old, g[layer], *rest))
        return jax.tree.map(lambda each, value: each.at[layer].set(value), carried, new)

    return jax.lax.fori_loop(0, len(p), turn, (p, *moments))
