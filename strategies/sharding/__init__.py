"""One run on several ranks: what each rank holds of the batch, the parameters, the moments and the activations."""

from typing import Any

from harness import Strategy, hookimpl
from strategies.sharding import (
    ddp,
    fsdp,
    ring_attention,
    sequence_parallel,
    tensor_parallel,
    vocabulary_parallel_loss,
    zero1,
)

DIVIDED = ("shard_batch", "reduce_gradients")


def _of(module: Any) -> tuple[dict[str, Any], str]:
    """Return the two forms of a strategy and the docstring of its module."""
    return {"torch": module.on_torch, "jax": module.on_jax}, module.__doc__


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy("ddp", DIVIDED, *_of(ddp), ranks=True),
        Strategy(
            "zero1",
            (*DIVIDED, "init", "gather_parameters", "update"),
            *_of(zero1),
            ranks=True,
        ),
        Strategy(
            "fsdp",
            (*DIVIDED, "draw", "grad", "gather_parameters"),
            *_of(fsdp),
            calls=("embed", "block", "loss"),
            ranks=True,
        ),
        Strategy(
            "tensor_parallel",
            (*DIVIDED, "draw", "mix", "feed", "gather_parameters"),
            *_of(tensor_parallel),
            ranks=True,
        ),
        Strategy(
            "sequence_parallel",
            (*DIVIDED, "mix", "positions"),
            *_of(sequence_parallel),
            calls=("attend",),
            ranks=True,
        ),
        Strategy(
            "ring_attention",
            (*DIVIDED, "attend", "positions"),
            *_of(ring_attention),
            ranks=True,
        ),
        Strategy(
            "vocabulary_parallel_loss",
            (*DIVIDED, "draw", "embed", "loss", "gather_parameters"),
            *_of(vocabulary_parallel_loss),
            probe={"chunk": 23},
            ranks=True,
        ),
    ]
