"""Keep one momentum for the matrices of the layers and make it orthogonal at each step; pay the products for that.

Peak: 4 bytes of moments for each parameter of those matrices instead of 8, and while one is updated a few 16-bit copies
of it. The rule is that of torch.optim.Muon (Jordan et al., 2024; Liu et al., 2025, arXiv:2502.16982): momentum with
Nesterov's look ahead, five Newton-Schulz iterations in bfloat16, and a learning rate that grows with the root of rows
over columns, as they are stored. Vectors, the embedding and the head are updated by AdamW.
"""

import math
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, optimizers, tree

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
LEAST_NORM = 1e-7
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


def is_hidden(name: str, dimensions: int) -> bool:
    """Say whether a parameter is a matrix within the network, which Muon is meant for."""
    return dimensions == 2 and name not in ("embed", "head")


def on_torch(parts: Parts, momentum: float = 0.95) -> Parts:
    import torch

    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        return {**state, "moments": tree.mapped(begin, state["params"], tree.names(state["params"]))}

    def begin(p: Any, name: str) -> list[Any]:
        count = 1 if is_hidden(name, p.dim()) else 2
        return [torch.zeros_like(p, requires_grad=False) for _ in range(count)]

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        rate = parts.shape.learning_rate

        def move(p: Any, g: Any, held: list[Any]) -> None:
            p.mul_(1 - rate * parts.shape.weight_decay)
            if len(held) == 1:
                held[0].lerp_(g, 1 - momentum)
                change = orthogonal(g.lerp(held[0], momentum))
                p.add_(change, alpha=-rate * math.sqrt(max(1, p.shape[0] / p.shape[1])))
                return
            m, v = held
            m.lerp_(g, 1 - BETA_1)
            v.mul_(BETA_2).addcmul_(g, g, value=1 - BETA_2)
            scale = v.sqrt().div_(math.sqrt(1 - BETA_2**steps)).add_(EPSILON)
            p.addcdiv_(m, scale, value=-rate / (1 - BETA_1**steps))

        tree.mapped(move, state["params"], grads, state["moments"])
        return {**state, "steps": steps}

    def orthogonal(x: Any) -> Any:
        """Bring the singular values of a matrix near 1."""
        x = x.bfloat16()
        if tall := x.shape[0] > x.shape[1]:
            x = x.T
        x = x / x.norm().clamp(min=LEAST_NORM)
        for _ in range(ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
        return x.T if tall else x

    return replace(parts, init=init, update=update)


def on_jax(parts: Parts, momentum: float = 0.95) -> Parts:
    import jax.numpy as jnp

    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        second = tree.mapped(
            lambda p, name: {} if is_hidden(name, p.ndim - optimizers.stacked(name)) else jnp.zeros_like(p),
            state["params"],
            tree.names(state["params"]),
        )
        return {**state, "second": second}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        steps = state["steps"] + 1
        count = steps.astype(jnp.float32)
        rate = parts.shape.learning_rate

        def move(p: Any, g: Any, m: Any, v: Any) -> Any:
            kept = p * (1 - rate * parts.shape.weight_decay)
            if isinstance(v, dict):
                m = m + (1 - momentum) * (g - m)
                change = orthogonal(g + momentum * (m - g)).astype(p.dtype)
                moved = kept - rate * math.sqrt(max(1, p.shape[0] / p.shape[1])) * change
                return moved.astype(p.dtype), m.astype(p.dtype), v
            m = m + (1 - BETA_1) * (g - m)
            v = BETA_2 * v + (1 - BETA_2) * g * g
            scale = jnp.sqrt(v) / jnp.sqrt(1 - BETA_2**count) + EPSILON
            moved = kept - rate / (1 - BETA_1**count) * (m / scale)
            return moved.astype(p.dtype), m.astype(p.dtype), v.astype(p.dtype)

        return optimizers.moved(state, grads, ("first", "second"), move)

    def orthogonal(x: Any) -> Any:
        """Bring the singular values of a matrix near 1."""
        x = x.astype(jnp.bfloat16)
        if tall := x.shape[0] > x.shape[1]:
            x = x.T
        norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum())
        x = x / jnp.maximum(norm, LEAST_NORM).astype(jnp.bfloat16)
        for _ in range(ITERATIONS):
            gram = x @ x.T
            x = A * x + (B * gram + C * (gram @ gram)) @ x
        return x.T if tall else x

    return replace(parts, init=init, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "muon",
            rewrites=("init", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
