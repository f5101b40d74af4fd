"""What optimizers as strategies share: the state of each parameter alone, and each tensor moved by itself."""

from collections.abc import Callable, Iterator
from typing import Any

from harness.contract.toolkit import trees


def one_by_one(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the state of each parameter alone, with its dotted name: an `update` can be called with it."""
    moments: list[Any] = []
    if state["moments"] is not None:
        trees.mapped(lambda _, tensors: moments.append(tensors), state["params"], state["moments"])
    for at, (name, p) in enumerate(trees.leaves(state["params"])):
        yield name, {**state, "params": {name: p}, "moments": {name: moments[at]} if moments else None}


def joined(state: Any, alone: dict[str, Any]) -> Any:
    """Put the states of all parameters together again."""
    names = [name for name, _ in trees.leaves(state["params"])]
    whole = {**alone[names[0]]}
    for key in ("params", "moments"):
        values = [alone[name][key] for name in names]
        whole[key] = (
            None
            if values[0] is None
            else trees.rebuilt(state["params"], (of[name] for of, name in zip(values, names, strict=True)))
        )
    return whole


def stacked(name: str) -> bool:
    """Return whether a leaf of that name holds one tensor for each layer, along its first dimension (in JAX)."""
    return name.startswith("layers.")


def moved(state: Any, grads: Any, keys: tuple[str, ...], move: Callable[..., Any]) -> Any:
    """Move each tensor, or each layer's, by `move(p, g, *moments) -> (p, *moments)` and count the step (in JAX).

    `keys` names what the optimizer keeps in the state: of each, `move` takes and returns what belongs to the tensor.
    """
    params = state["params"]
    moments = (state[key] for key in keys)
    new = trees.mapped(lambda p, name, *of: _by_layer(move, name, p, *of), params, trees.names(params), grads, *moments)
    parted = {key: trees.mapped(lambda _, of, at=at: of[at], params, new) for at, key in enumerate(("params", *keys))}
    return {**state, **parted, "steps": state["steps"] + 1}


def _by_layer(move: Callable[..., Any], name: str, p: Any, g: Any, *moments: Any) -> Any:
    """Call `move` for a tensor, or in turn for that of each layer, whose result takes the place of the old."""
    import jax

    if not stacked(name):
        return move(p, g, *moments)

    def turn(layer: Any, carried: Any) -> Any:
        old, *rest = jax.tree.map(lambda each: each[layer], carried)
        new = tuple(move(old, g[layer], *rest))
        return jax.tree.map(lambda each, value: each.at[layer].set(value), carried, new)

    return jax.lax.fori_loop(0, len(p), turn, (p, *moments))
