"""Train one block of the parameters at a time by Adam, in turn; pay steps in which the others stand still.

Peak: the parameters, and gradients and moments of the largest block alone: 12 bytes for each of its parameters. Blocks
are each layer and each tensor outside of the layers, the largest first. A block is trained for `every` steps, with
moments and a count of steps that begin anew (Luo et al., 2024, arXiv:2404.02827). No gradient is made of what stands
still, and activations that only its gradient would need are not kept: where the head comes first, the blocks after it
keep more, in steps that are neither predicted nor measured here. torch only: in JAX the layers are one stacked array,
the gradient of which is whole.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, tree
from strategies.optimizers._in_turn import CONFLICTS, block_of, in_turn


def turns(params: Any) -> list[str]:
    """Return the blocks, the largest first."""
    sizes: dict[str, int] = {}
    for name, p in tree.leaves(params):
        sizes[block_of(name)] = sizes.get(block_of(name), 0) + p.numel()
    return sorted(sizes, key=lambda block: -sizes[block])


def on_torch(parts: Parts, every: int = 100) -> Parts:
    if every < 1:
        raise ValueError(f"badam: a block cannot be trained for {every} steps: set every to 1 or more")

    def chosen(params: Any, turn: int) -> set[str]:
        blocks = turns(params)
        return {blocks[turn % len(blocks)]}

    return in_turn(parts, every, chosen)


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
            conflicts=CONFLICTS,
        )
    ]
