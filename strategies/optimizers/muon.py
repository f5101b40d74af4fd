"""Keep one momentum for the matrices of the layers and make it orthogonal; pay the products for that at each step.

Peak: 4 bytes of moments for each parameter of those matrices instead of 8, and while one is updated a few 16-bit copies
of it. The rule is that of torch.optim.Muon (Jordan et al., 2024; Liu et al., 2025, arXiv:2502.16982): momentum with
Nesterov's look ahead, five Newton-Schulz iterations in bfloat16, and a learning rate that grows with the root of
outputs over inputs, whichever of both are the rows. All else is updated by AdamW: vectors, embeddings, positions, the
head, and experts that are stacked in one tensor.
"""

import math
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, optimizers, tree, update_rules

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
LEAST_NORM = 1e-7


def orthogonal_in_torch(x: Any) -> Any:
    """Bring the singular values of a matrix near 1, in bfloat16."""
    import torch

    x = x.bfloat16()
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def orthogonal_in_jax(x: Any) -> Any:
    """Bring the singular values of a matrix near 1, in bfloat16."""
    import jax.numpy as jnp

    x = x.astype(jnp.bfloat16)
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum())
    x = x / jnp.maximum(norm, LEAST_NORM).astype(jnp.bfloat16)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x.T if tall else x


def growth(parts: Parts, name: str, p: Any) -> float:
    """Return by what the rate of a matrix grows."""
    rows, columns = p.shape
    outputs, inputs = (rows, columns) if parts.outputs_first(name) else (columns, rows)
    return math.sqrt(max(1, outputs / inputs))


def on_torch(parts: Parts, momentum: float = 0.95) -> Parts:
    import torch

    knobs.share("muon", momentum=momentum)
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        return {**state, "moments": tree.mapped(begin, state["params"], tree.names(state["params"]))}

    def begin(p: Any, name: str) -> list[Any]:
        count = 1 if update_rules.is_hidden(name, p.dim()) else 2
        return [torch.zeros_like(p, requires_grad=False) for _ in range(count)]

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        rate, decay = parts.shape.learning_rate, parts.shape.weight_decay

        def move(p: Any, name: str, g: Any, moments: list[Any]) -> None:
            if len(moments) == 2:
                m, v = moments
                optimizers.adamw_in_torch(p, g, m, v, steps, rate, decay)
                return
            p.mul_(1 - rate * decay)
            moments[0].lerp_(g, 1 - momentum)
            change = orthogonal_in_torch(g.lerp(moments[0], momentum))
            p.add_(change, alpha=-rate * growth(parts, name, p))

        tree.mapped(move, state["params"], tree.names(state["params"]), grads, state["moments"])
        return {**state, "steps": steps}

    return replace(parts, init=init, update=update)


def on_jax(parts: Parts, momentum: float = 0.95) -> Parts:
    import jax.numpy as jnp

    knobs.share("muon", momentum=momentum)
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(replace(parts, moments=frozenset({"first"})), source)
        second = tree.mapped(
            lambda p, name: (
                {} if update_rules.is_hidden(name, p.ndim - optimizers.of_layers(name)) else jnp.zeros_like(p)
            ),
            state["params"],
            tree.names(state["params"]),
        )
        return {**state, "second": second}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        rate, decay = parts.shape.learning_rate, parts.shape.weight_decay

        def move(p: Any, g: Any, m: Any, v: Any, name: str) -> Any:
            if not isinstance(v, dict):
                return optimizers.adamw_in_jax(p, g, m, v, state["steps"] + 1, rate, decay)
            m = m + (1 - momentum) * (g - m)
            change = orthogonal_in_jax(g + momentum * (m - g)).astype(p.dtype)
            new = p * (1 - rate * decay) - rate * growth(parts, name, p) * change
            return new.astype(p.dtype), m.astype(p.dtype), v

        return optimizers.moved(state, grads, ("first", "second"), move, tree.names(state["params"]))

    return replace(parts, init=init, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "muon",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            conflicts={"mapped_moments": "it takes slices of rows, and a slice is orthogonal to no other"},
        )
    ]
