"""Segments of a row after each other in JAX: the first by itself, the others as a scan that carries their states."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from harness import IGNORED, Parts, tree
from strategies.scan.chunked_recurrence import lengths
from strategies.scan.truncated_bptt import WITHOUT


def truncated(parts: Parts, steps: int) -> Parts:
    """Take the gradient segment by segment."""
    inner = parts.grad

    def grad(parts: Parts, state: Any, x_BTF: Any, y_BT: Any) -> Any:
        params, total = state["params"], (y_BT != IGNORED).sum()
        whole = tree.merged(state["frozen"], params) if "frozen" in state else params

        def segment(so_far: Any, rows: Any) -> Any:
            loss, sums, before = so_far
            x_BCF, y_BC = rows
            count = (y_BC != IGNORED).sum()
            value, grads = inner(_beginning(parts, before), state, x_BCF, y_BC)

            def weighed(of: Any, weight: Any) -> Any:
                return jnp.where(count > 0, of * weight.astype(of.dtype), 0)  # a mean of none is no number

            sums = jax.tree.map(lambda sum_, g: sum_ + weighed(g, count / total), sums, grads)
            after = _states_after(parts, whole["layers"], parts.embed(parts, whole, x_BCF), before)
            return (loss + weighed(value, count), sums, after), None

        first, *others = lengths(x_BTF.shape[1], steps)
        nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params), None
        so_far, _ = segment(nothing, (x_BTF[:, :first], y_BT[:, :first]))
        if others:
            rest = (_segments(rows_BT[:, first:], len(others)) for rows_BT in (x_BTF, y_BT))
            so_far, _ = jax.lax.scan(segment, so_far, tuple(rest))
        loss, sums, _ = so_far
        return loss / total, sums

    return replace(parts, grad=grad)


def _segments(rows_BT: Any, count: int) -> Any:
    """Cut rows along their second dimension, which becomes two; the segments come first."""
    return jnp.moveaxis(rows_BT.reshape(len(rows_BT), count, -1, *rows_BT.shape[2:]), 1, 0)


def _beginning(parts: Parts, before: Any) -> Parts:
    """Let each layer begin with the states of the segment before."""
    stack_, recur_ = parts.stack, parts.recur

    def stack(parts: Parts, ps: Any, x_BCD: Any) -> Any:
        def one(x_BCD: Any, layer: Any) -> Any:
            p, states = layer

            def recur(parts: Parts, p: Any, x_BCD: Any, _: Any) -> Any:
                cast = jax.tree.map(lambda of: of.astype(x_BCD.dtype), states)  # those of layers that were not
                return recur_(parts, p, x_BCD, cast)

            alone = jax.tree.map(lambda of: of[None], p)
            return stack_(replace(parts, recur=recur), alone, x_BCD), None

        return jax.lax.scan(one, x_BCD, (ps, before))[0]

    return replace(parts, stack=stack)


def _states_after(parts: Parts, ps: Any, x_BCD: Any, before: Any) -> Any:
    """Run all layers forward; return the states that each leaves, on top of each other."""
    recur_ = parts.recur

    def one(x_BCD: Any, layer: Any) -> Any:
        p, states = layer
        left = []

        def recur(parts: Parts, p: Any, x_BCD: Any, _: Any) -> Any:
            y_BCD, after = recur_(parts, p, x_BCD, states)
            left.append(after)
            return y_BCD, after

        x_BCD = parts.block(replace(parts, recur=recur), p, x_BCD)
        if not left:
            raise ValueError(WITHOUT)
        return x_BCD, left[-1]

    return jax.lax.scan(one, x_BCD, (ps, before))[1]
