"""Keep only the input of every k-th layer; recompute the layers between in the backward pass.

Peak of the activations: (L / k) hidden states plus what k + 1 blocks save. Source: Chen et al., "Training Deep Nets
with Sublinear Memory Cost" (2016). `every` is k, the layers in one segment: 1 checkpoints each block, and 0 takes the
square root of the layers, which is the best k only where a block saves about as much as its input.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs


def length(every: int, layers: int) -> int:
    """Return the layers of a segment."""
    return every or math.isqrt(max(0, layers - 1)) + 1


def on_torch(parts: Parts, every: int = 1) -> Parts:
    from torch.utils.checkpoint import checkpoint

    knobs.at_least_0("checkpoint", every=every)
    inner = parts.stack

    def stack(parts: Parts, ps: list[Any], x_BTD: Any) -> Any:
        segment = length(every, len(ps))
        for start in range(0, len(ps), segment):
            x_BTD = checkpoint(inner, parts, ps[start : start + segment], x_BTD, use_reentrant=False)
        return x_BTD

    return replace(parts, stack=stack)


def on_jax(parts: Parts, every: int = 1) -> Parts:
    import jax

    knobs.at_least_0("checkpoint", every=every)
    inner = parts.stack

    def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
        segment = jax.checkpoint(partial(inner, parts), prevent_cse=False)
        layers = len(jax.tree.leaves(ps)[0])
        size = length(every, layers)
        whole = layers - layers % size
        if whole:
            segments = jax.tree.map(lambda p: p[:whole].reshape(-1, size, *p.shape[1:]), ps)
            x_BTD = jax.lax.scan(lambda x, p: (segment(p, x), None), x_BTD, segments)[0]
        return x_BTD if whole == layers else segment(jax.tree.map(lambda p: p[whole:], ps), x_BTD)

    return replace(parts, stack=stack)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("checkpoint", rewrites=("stack",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
