"""Keep the state of an LSTM or a GRU only at the borders of chunks; pay a second pass through each chunk.

Peak: T / C states, and what the C steps of one chunk save (gates and cells, several times B D a step). State and
gradient pass from chunk to chunk, so the result is that of the whole row. Source: Chen et al., "Training Deep Nets with
Sublinear Memory Cost" (2016), applied over time; Gruslys et al., "Memory-Efficient Backpropagation Through Time" (2016,
arXiv:1606.03401). `chunk` is C, in steps; 0 takes the square root of T. The first chunk is the one that may be shorter.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl


def lengths(steps: int, chunk: int) -> list[int]:
    """Cut so many steps into chunks, all of one length but for a shorter first; raise ValueError for a negative one."""
    if chunk < 0:
        raise ValueError(f"chunked_recurrence: chunk is {chunk} steps: give at least 1, or 0 for the square root")
    size = min(steps, chunk or math.isqrt(max(0, steps - 1)) + 1)
    others = (steps - 1) // size
    return [steps - others * size, *[size] * others]


def on_torch(parts: Parts, chunk: int = 0) -> Parts:
    import torch
    from torch.utils.checkpoint import checkpoint

    inner = parts.recur

    def recur(parts: Parts, p: Any, x_BTD: Any, carried: Any) -> Any:
        ys = []
        for x_BCD in x_BTD.split(lengths(x_BTD.shape[1], chunk), 1):
            y_BCD, carried = checkpoint(inner, parts, p, x_BCD, carried, use_reentrant=False)
            ys.append(y_BCD)
        return torch.cat(ys, 1), carried

    return replace(parts, recur=recur)


def on_jax(parts: Parts, chunk: int = 0) -> Parts:
    import jax
    import jax.numpy as jnp

    inner = parts.recur

    def recur(parts: Parts, p: Any, x_BTD: Any, carried: Any) -> Any:
        one = jax.checkpoint(partial(inner, parts), prevent_cse=False)
        first, *others = lengths(x_BTD.shape[1], chunk)
        y_BCD, carried = one(p, x_BTD[:, :first], carried)
        if not others:
            return y_BCD, carried
        B, _, D = x_BTD.shape
        x_MBCD = jnp.moveaxis(x_BTD[:, first:].reshape(B, len(others), -1, D), 1, 0)

        def turn(carried: Any, x_BCD: Any) -> tuple[Any, Any]:
            y_BCD, carried = one(p, x_BCD, carried)
            return carried, y_BCD

        carried, y_MBCD = jax.lax.scan(turn, carried, x_MBCD)
        return jnp.concatenate([y_BCD, jnp.moveaxis(y_MBCD, 0, 1).reshape(B, -1, y_BCD.shape[-1])], 1), carried

    return replace(parts, recur=recur)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "chunked_recurrence",
            rewrites=("recur",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"chunk": 5},
        )
    ]
