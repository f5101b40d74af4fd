"""Keep the input of every k-th layer, and within one segment that of each layer; pay up to two more forward passes.

Peak of the activations: (L / k + k) hidden states and what one block saves. It pays where a stack is so deep that the L
hidden states of `checkpoint` outweigh one block. Source: Griewank and Walther, "Revolve" (2000), at two levels; Chen
et al., "Training Deep Nets with Sublinear Memory Cost" (2016). `every` is k; 0 takes the square root of the layers.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs


def nested(checkpoint: Any, parts: Parts, every: int) -> Parts:
    """Checkpoint segments of a stack whose layers are checkpointed one by one."""
    outer = checkpoint(checkpoint(parts, every=1), every=every)
    return replace(parts, stack=outer.stack)


def on_torch(parts: Parts, every: int = 0) -> Parts:
    from strategies.activations import checkpoint

    knobs.at_least_0("nested_checkpoint", every=every)
    return nested(checkpoint.on_torch, parts, every)


def on_jax(parts: Parts, every: int = 0) -> Parts:
    from strategies.activations import checkpoint

    knobs.at_least_0("nested_checkpoint", every=every)
    return nested(checkpoint.on_jax, parts, every)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("nested_checkpoint", rewrites=("stack",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
