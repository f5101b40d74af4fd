"""Train one block of the parameters at a time by Adam, in turn; pay steps in which the others stand still.

Peak: the parameters, and gradients and moments of the largest block alone: 12 bytes for each of its parameters. Blocks
are each layer and each tensor outside of the layers, the largest first. A block is trained for `every` steps, with
moments and a count of steps that begin anew (Luo et al., 2024, arXiv:2404.02827). No gradient is made of what stands
still, and activations that only its gradient would need are not kept: where the head comes first, the blocks after it
keep more, in steps that are neither predicted nor measured here. torch only: in JAX the layers are one stacked array,
the gradient of which is whole.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, optimizers, tree


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: `layers.3`, or its own name."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name


def turns(params: Any) -> list[str]:
    """Return the blocks, the largest first."""
    sizes: dict[str, int] = {}
    for name, p in tree.leaves(params):
        sizes[block_of(name)] = sizes.get(block_of(name), 0) + p.numel()
    return sorted(sizes, key=lambda block: -sizes[block])


def on_torch(parts: Parts, every: int = 100) -> Parts:
    if every < 1:
        raise ValueError(f"badam: a block cannot be trained for {every} steps: set every to 1 or more")
    import torch

    inner_init, inner_grad = parts.init, parts.grad

    def active(state: Any) -> str:
        blocks = turns(state["params"])
        return blocks[state["steps"] // every % len(blocks)]

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        return {**state, "moments": tree.mapped(lambda p: [], state["params"])}

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        block = active(state)
        for name, p in tree.leaves(state["params"]):
            p.requires_grad_(block_of(name) == block)
        return inner_grad(parts, state, x, y)

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        block, steps = active(state), state["steps"] % every + 1

        def moved(p: Any, name: str, g: Any, moments: list[Any]) -> list[Any]:
            if block_of(name) != block:
                return []
            m, v = moments or [torch.zeros_like(p, requires_grad=False) for _ in range(2)]
            optimizers.adamw_in_torch(p, g, m, v, steps, parts.shape.learning_rate, parts.shape.weight_decay)
            return [m, v]

        params = state["params"]
        if steps == 1:  # those of the block before are dropped first
            state["moments"] = tree.mapped(lambda p: [], params)
        moments = tree.mapped(moved, params, tree.names(params), grads, state["moments"])
        return {**state, "moments": moments, "steps": state["steps"] + 1}

    return replace(parts, init=init, grad=grad, update=update)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "badam",
            rewrites=("init", "grad", "update"),
            calls=("init", "grad"),
            on={"torch": on_torch},
            about=__doc__,
            approximate=True,
            probe={"every": 2},
            conflicts={
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
            },
        )
    ]
