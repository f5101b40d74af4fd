"""Train some layers at a time by Adam, drawn anew every few steps; pay steps in which the other layers stand still.

Peak: the parameters, and gradients and moments of `layers` of the layers and of what stands outside of them (embedding,
last norm, head), which is trained in every step: 12 bytes for each of these. The layers of a turn are drawn, all alike,
for `every` steps, and their moments begin anew with it (LISA: Pan et al., 2024, arXiv:2403.17919); the draw is the same
in every run. Unlike with `badam` every step trains the ends of the model, so activations are kept down to the
embedding. Nothing is saved where the layers are few, or small beside the vocabulary. torch only: in JAX the layers are
one stacked array, the gradient of which is whole.
"""

from random import Random
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, tree
from strategies.optimizers._in_turn import CONFLICTS, block_of, in_turn


def drawn(params: Any, turn: int, layers: int) -> set[str]:
    """Draw the layers of a turn; all where there are no more."""
    blocks = dict.fromkeys(block_of(name) for name, _ in tree.leaves(params))
    known = [block for block in blocks if is_layer(block)]
    return set(Random(turn).sample(known, min(layers, len(known))))


def is_layer(block: str) -> bool:
    """Return whether a block is a layer, and no tensor outside of them."""
    return block.startswith("layers.")


def on_torch(parts: Parts, layers: int = 2, every: int = 20) -> Parts:
    knobs.above_0("lisa", layers=layers, every=every)
    return in_turn(
        parts, every, lambda params, turn: drawn(params, turn, layers), always=lambda block: not is_layer(block)
    )


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "lisa",
            rewrites=("init", "grad", "update"),
            calls=("init", "grad"),
            on={"torch": on_torch},
            about=__doc__,
            approximate=True,
            probe={"layers": 1, "every": 2},
            conflicts=CONFLICTS,
        )
    ]
