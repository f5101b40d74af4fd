"""Moments in parts, in JAX: gradients are summed into parts, and what they moved is gathered."""

from dataclasses import replace
from typing import Any

from harness import Parts, tree
from strategies.sharding._jax import (
    Size,
    after,
    all_gather,
    by_rows,
    dividing,
    divisible,
    drawn_divided,
    filled,
    gathered,
    leaves,
    over_devices,
    own_piece,
    rows_axis,
    sized,
    summed_part,
)
from strategies.sharding.shares import ROWS


def zero1(parts: Parts) -> Parts:
    """Hold a part of the moments of every matrix; sum its gradient into parts, and gather what they moved."""
    parts = dividing(parts, by_rows, ROWS)
    inner_init, inner_update = parts.init, parts.update

    def init(parts: Parts, source: Any = None) -> Any:
        drawn, own = parts.draw, set[str]()

        def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
            value = drawn(parts, name, shape, deviation)
            part = drawn_divided(lambda *_: value)(parts, name, shape, deviation)
            if part is not value:
                own.add(name)
            return part

        def whole(params: Any) -> Any:
            """Gather what was divided for the moments alone: what another strategy has divided stays so."""
            those = {name: part for name, part in tree.leaves(params) if name in own}
            again = parts.gather_parameters(parts, those)
            return tree.mapped(lambda part, name: again.get(name, part), params, tree.names(params))

        state = inner_init(replace(parts, draw=draw), source)
        return {**state, **{key: whole(state[key]) for key in ("params", "frozen") if key in state}}

    def reduce_gradients(parts: Parts, loss: Any, grads: Any) -> Any:
        names = {name for name, grad, size in leaves(parts, grads) if size is None or grad.shape == size}
        cut = {name for name, _, size in leaves(parts, grads) if name in names and divisible(name, size)}
        loss, grads = over_devices(parts, loss, grads, names - cut)
        before = [loss, *(grad for name, grad in tree.leaves(grads) if name not in cut)]

        def in_parts(name: str, grad: Any) -> Any:
            if name not in cut or parts.ranks == 1:
                return grad
            axis = rows_axis(name)
            whole = filled(after(grad, *before), -(-grad.shape[axis] // parts.ranks) * parts.ranks, axis)
            return summed_part(parts, whole, axis)

        return loss, tree.mapped(in_parts, tree.names(grads), grads)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        params = state["params"]
        whole = tree.mapped(lambda p, g: p.shape == g.shape, params, grads)

        def own(name: str, param: Any, whole: bool) -> Any:
            return param if whole else own_piece(parts, param, rows_axis(name))

        def joined(name: str, part: Any, size: Size | None, whole: bool) -> Any:
            if whole or size is None:
                return part
            return all_gather(parts, part, rows_axis(name))[tuple(map(slice, size))]

        names = tree.names(params)
        moved = inner_update(parts, {**state, "params": tree.mapped(own, names, params, whole)}, grads)
        return {**moved, "params": tree.mapped(joined, names, moved["params"], sized(parts, params), whole)}

    gather_parameters = gathered(parts.gather_parameters)
    return replace(
        parts, init=init, reduce_gradients=reduce_gradients, update=update, gather_parameters=gather_parameters
    )
