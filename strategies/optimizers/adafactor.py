"""Keep one number for each row and column of the second moment and no first moment; pay another rule of update.

Peak: 4 * (rows + columns) bytes of moments for each matrix instead of 8 * rows * columns, vectors in full; scratch of
one tensor. The rule is that of Shazeer and Stern, 2018 (arXiv:1804.04235), as torch.optim.Adafactor has it: the
estimate is the product of both means, steps are relative to the root mean square of the tensor and clipped at 1, and
the decay approaches 1 as 1 - steps ** -0.8. The learning rate is a bound: a step is no larger than 1 / sqrt(steps).
"""

import math
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, optimizers, tree

DECAY, CLIP, LEAST_SCALE = -0.8, 1.0, 1e-3


def on_torch(parts: Parts) -> Parts:
    import torch

    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        return {**state, "moments": tree.mapped(begin, state["params"])}

    def begin(p: Any) -> list[Any]:
        if p.dim() < 2:
            return [torch.zeros_like(p, requires_grad=False)]
        return [p.new_zeros(*p.shape[:-1], 1), p.new_zeros(*p.shape[:-2], 1, p.shape[-1])]

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        rate, weight_decay = parts.shape.learning_rate, parts.shape.weight_decay
        share = steps**DECAY

        def move(p: Any, g: Any, means: list[Any]) -> None:
            least = torch.finfo(p.dtype).eps
            # Scales stay tensors: to read one would wait for the device.
            scale = (p.norm() / math.sqrt(p.numel())).clamp(min=LEAST_SCALE) * min(rate, steps**-0.5)
            p.mul_(1 - rate * weight_decay)
            if p.dim() < 2:
                change = means[0].lerp_(g * g, share).clone()
            else:
                row, column = means
                row.lerp_(g.norm(dim=-1, keepdim=True).square_().div_(g.shape[-1]), share)
                column.lerp_(g.norm(dim=-2, keepdim=True).square_().div_(g.shape[-2]), share)
                change = (row @ column).div_(row.mean(dim=-2, keepdim=True).clamp_(min=least))
            change.clamp_(min=least * least).rsqrt_().mul_(g)
            clip = (change.norm() / (math.sqrt(p.numel()) * CLIP)).clamp(min=1.0)
            p.sub_(change.mul_(scale / clip))

        tree.mapped(move, state["params"], grads, state["moments"])
        return {**state, "steps": steps}

    return replace(parts, init=init, update=update)


def rms(x: Any) -> Any:
    """Compute the root mean square of a JAX array, in float32 at the least."""
    import jax.numpy as jnp

    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))))


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(replace(parts, moments=frozenset()), source)
        return {**state, "second": tree.mapped(begin, state["params"], tree.names(state["params"]))}

    def begin(p: Any, name: str) -> Any:
        if p.ndim - optimizers.of_layers(name) < 2:
            return jnp.zeros(p.shape, p.dtype)
        column = (*p.shape[:-2], 1, p.shape[-1])
        return {"row": jnp.zeros((*p.shape[:-1], 1), p.dtype), "column": jnp.zeros(column, p.dtype)}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        count = steps.astype(jnp.float32)
        rate, weight_decay = parts.shape.learning_rate, parts.shape.weight_decay
        share = count**DECAY

        def move(p: Any, g: Any, means: Any) -> Any:
            least = float(jnp.finfo(p.dtype).eps)
            scale = jnp.maximum(rms(p), LEAST_SCALE) * jnp.minimum(rate, count**-0.5)
            g = g.astype(jnp.promote_types(p.dtype, jnp.float32))
            if isinstance(means, dict):
                row = means["row"] + share * (jnp.mean(g * g, -1, keepdims=True) - means["row"])
                column = means["column"] + share * (jnp.mean(g * g, -2, keepdims=True) - means["column"])
                estimate = row * column / jnp.maximum(row.mean(-2, keepdims=True), least)
                new: Any = {"row": row.astype(p.dtype), "column": column.astype(p.dtype)}
            else:
                estimate = means + share * (g * g - means)
                new = estimate.astype(p.dtype)
            change = g / jnp.sqrt(jnp.maximum(estimate, least * least))
            clip = jnp.maximum(1.0, rms(change) / CLIP)
            return (p * (1 - rate * weight_decay) - scale / clip * change).astype(p.dtype), new

        return optimizers.moved(state, grads, ("second",), move)

    return replace(parts, init=init, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "adafactor",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
