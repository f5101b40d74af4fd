"""Adapters in JAX, those of all layers stacked."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from harness import Parts, mesh
from strategies.adapters.lora import ADAPTERS, Sizes, chosen, deviation, of_shape, one_token, refuse_others, watched


def adapted(parts: Parts, rank: int, alpha: float, targets: str) -> Parts:
    """Freeze the model and train adapters of its matrices."""
    inner_init, inner_linear = parts.init, parts.linear

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(replace(parts, moments=frozenset(), ranks=1, draw=partial(_on_each, parts)), source)
        refuse_others(state)
        frozen = state["params"]
        params = {"layers": {ADAPTERS: _adapters(parts, frozen, rank, targets)}}
        moments = {key: jax.tree.map(jnp.zeros_like, params) for key in sorted(parts.moments)}
        return {**state, **moments, "params": params, "frozen": frozen}

    def linear(parts: Parts, p: Any, name: str, x: Any) -> Any:
        y = inner_linear(parts, p, name, x)
        adapter = p.get(ADAPTERS, {}).get(name)
        if adapter is None:
            return y
        low = x.astype(adapter["a"].dtype) @ adapter["a"].T @ adapter["b"].T
        return (y + low * (alpha / rank)).astype(y.dtype)

    return replace(parts, init=init, linear=linear)


def _on_each(parts: Parts, inside: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
    """Draw a parameter for all ranks and put it on each; `init` sees one rank, since a packed one is no array."""
    value = parts.draw(replace(inside, ranks=parts.ranks, draw=parts.draw), name, shape, deviation)
    return jax.tree.map(partial(mesh.on_each, parts.ranks), value)


def _adapters(parts: Parts, frozen: Any, rank: int, targets: str) -> Any:
    """Draw the adapters of all layers, whole on every rank."""
    sizes = _sizes(parts, frozen) if parts.ranks == 1 else of_shape(parts)
    layers = len(jax.tree.leaves(frozen["layers"])[0])

    def drawn(name: str, shape: tuple[int, int], deviation: float) -> Any:
        value = parts.draw(parts, f"layers.{ADAPTERS}.{name}", (layers, *shape), deviation)
        return mesh.on_each(parts.ranks, value.astype(jnp.promote_types(value.dtype, jnp.float32)))

    return {
        name: {
            "a": drawn(f"{name}.a", (rank, sizes[name][0]), deviation(sizes[name][0])),
            "b": drawn(f"{name}.b", (sizes[name][1], rank), -1),
        }
        for name in sorted(chosen(sizes, targets))
    }


def _sizes(parts: Parts, params: Any) -> Sizes:
    """Return the sizes of the matrices of a layer: one token without data is sent through it."""
    sizes: Sizes = {}
    watching = watched(parts, sizes)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    shape, dtype = one_token(parts)
    first = jax.ShapeDtypeStruct(shape, dtype)
    jax.eval_shape(lambda params, p, x: watching.block(watching, p, parts.embed(parts, params, x)), params, one, first)
    return sizes
