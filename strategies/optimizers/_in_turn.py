"""Train some blocks of the parameters at a time by Adam; what waits has no gradient and no moments. For torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Parts, optimizers, tree

CONFLICTS = {
    **dict.fromkeys(
        (
            "offloaded_moments",
            "mapped_moments",
            "update_in_backward",
            "clip_in_backward",
            "lomo",
            "sparse_embedding_gradient",
        ),
        "they update one parameter after the other, and which block's turn it is shows in all of them",
    ),
    **dict.fromkeys(
        ("accumulate", "truncated_bptt", "float16_scaled", "float16_master"),
        "gradients of blocks that wait take no memory, and cannot be written to",
    ),
    "float32_master": "it makes a gradient of 32 bits for every block, also for those that wait",
    **dict.fromkeys(
        ("before foreach_adamw", "before fused_adamw", "before bfloat16_stochastic"),
        "their update takes the place of its own, and knows no blocks",
    ),
}


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: `layers.3`, or its own name."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name


def in_turn(
    parts: Parts,
    every: int,
    chosen: Callable[[Any, int], set[str]],
    always: Callable[[str], bool] = lambda block: False,
) -> Parts:
    """Train the blocks that `chosen(params, turn)` names for `every` steps, and those that are trained always.

    Moments and the count of steps begin anew with each turn, but those of blocks that are trained always go on.
    """
    import torch

    inner_init, inner_grad = parts.init, parts.grad

    def active(state: Any) -> Callable[[str], bool]:
        blocks = chosen(state["params"], state["steps"] // every)
        return lambda name: always(block_of(name)) or block_of(name) in blocks

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        return {**state, "moments": tree.mapped(lambda p: [], state["params"])}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        is_active = active(state)
        for name, p in tree.leaves(state["params"]):
            p.requires_grad_(is_active(name))
        return inner_grad(parts, state, x, y)

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        is_active, steps = active(state), state["steps"]
        params, names = state["params"], tree.names(state["params"])

        def stays(p: Any, name: str, moments: list[Any]) -> list[Any]:
            return moments if always(block_of(name)) else []

        def moved(p: Any, name: str, g: Any, moments: list[Any]) -> list[Any]:
            if not is_active(name):
                return []
            m, v = moments or [torch.zeros_like(p, requires_grad=False) for _ in range(2)]
            count = (steps if always(block_of(name)) else steps % every) + 1
            optimizers.adamw_in_torch(p, g, m, v, count, parts.shape.learning_rate, parts.shape.weight_decay)
            return [m, v]

        if steps % every == 0:  # those of the turn before are dropped first
            state["moments"] = tree.mapped(stays, params, names, state["moments"])
        moments = tree.mapped(moved, params, names, grads, state["moments"])
        return {**state, "moments": moments, "steps": steps + 1}

    return replace(parts, init=init, grad=grad, update=update)
