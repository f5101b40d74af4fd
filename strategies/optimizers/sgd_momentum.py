"""Update with momentum alone; keep one moment instead of two, and no second one to scale the steps.

Peak: 4 bytes for each parameter less than AdamW in float32. It is another optimizer, not the same one made cheaper:
what it saves is shown, and its answer is not compared.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, tree


def on_torch(parts: Parts, momentum: float = 0.9) -> Parts:
    import torch

    knobs.share("sgd_momentum", momentum=momentum)
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        moments = tree.mapped(lambda p: [torch.zeros_like(p, requires_grad=False)], state["params"])
        return {**state, "moments": moments}

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        def move(p: Any, g: Any, moments: list[Any]) -> None:
            moments[0].mul_(momentum).add_(g)
            p.mul_(1 - parts.shape.learning_rate * parts.shape.weight_decay)
            p.add_(moments[0], alpha=-parts.shape.learning_rate)

        tree.mapped(move, state["params"], grads, state["moments"])
        return {**state, "steps": state["steps"] + 1}

    return replace(parts, init=init, update=update)


def on_jax(parts: Parts, momentum: float = 0.9) -> Parts:
    import jax

    knobs.share("sgd_momentum", momentum=momentum)
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        return inner(replace(parts, moments=frozenset({"first"})), source)

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        rate, decay = parts.shape.learning_rate, parts.shape.weight_decay
        moments = jax.tree.map(lambda m, g: (momentum * m + g).astype(m.dtype), state["first"], grads)
        params = jax.tree.map(
            lambda p, m: (p * (1 - rate * decay) - rate * m).astype(p.dtype), state["params"], moments
        )
        return {**state, "params": params, "first": moments, "steps": state["steps"] + 1}

    return replace(parts, init=init, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "sgd_momentum",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
