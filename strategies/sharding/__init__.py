"""One run on several ranks: what each rank holds of the batch, the parameters, the moments and the activations."""

from typing import Any

from harness import Strategy, hookimpl
from strategies.sharding import (
    ddp,
    fsdp,
    megatron_sequence_parallel,
    ring_attention,
    tensor_parallel,
    ulysses,
    vocabulary_parallel_loss,
    zero1,
    zero2,
)

DIVIDED = ("shard_batch", "reduce_gradients")
conflicts: dict[str, dict[str, str]] = {
    "zero": dict.fromkeys(
        (
            *("adafactor", "adam_4bit", "adam_8bit", "adam_mini", "apollo"),
            *("galore", "lion", "muon", "sgd_momentum", "soap"),
        ),
        "it divides the moments of AdamW, and makes no others",
    )
    | dict.fromkeys(
        ("before badam", "before lisa", "before bfloat16_stochastic", "before foreach_adamw", "before fused_adamw"),
        "their update takes the place of its own, and knows no parts: name it after",
    )
    | {"before mapped_moments": "whole parameters would be cut into slices, and gradients in parts: name it after"},
    "fsdp": dict.fromkeys(
        ("adafactor", "adam_mini", "apollo", "galore", "muon", "soap"),
        "the rule looks at whole matrices, and each rank has a flat part of them",
    )
    | {"offload_activations": "it would carry away the parameters that are made whole: use offload_boundary"},
    "tensors": dict.fromkeys(
        ("adafactor", "adam_mini", "apollo", "galore", "muon", "soap"),
        "the rule looks at whole matrices, and each rank has some columns or rows of them",
    ),
    "vocabulary": {
        "adafactor": "the rule looks at whole matrices, and each rank has some rows of the embedding and the head",
        "drop_ignored": "each rank would drop as many rows as it has without a target, and all must have as many",
        "chunked_backward_loss": "the classifier's gradient would be wrong where a rank has no target of its own",
    },
}
"""Strategies that do not go together with `zero1` and `zero2`, with `fsdp`, with those that divide the tensors of
layers, or with `vocabulary_parallel_loss`."""


def _of(module: Any) -> tuple[dict[str, Any], str]:
    """Return the forms of a strategy, one for each framework, and the docstring of its module."""
    forms = {"torch": module.on_torch}
    return forms | ({"jax": module.on_jax} if hasattr(module, "on_jax") else {}), module.__doc__


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy("ddp", DIVIDED, *_of(ddp), ranks=True),
        Strategy(
            "zero1",
            (*DIVIDED, "init", "gather_parameters", "update"),
            *_of(zero1),
            ranks=True,
            conflicts=conflicts["zero"],
        ),
        Strategy(
            "zero2",
            (*DIVIDED, "init", "grad", "gather_parameters", "update"),
            *_of(zero2),
            calls=("embed", "block", "loss"),
            ranks=True,
            conflicts=conflicts["zero"],
        ),
        Strategy(
            "fsdp",
            (*DIVIDED, "draw", "grad", "gather_parameters"),
            *_of(fsdp),
            calls=("embed", "block", "loss"),
            ranks=True,
            conflicts=conflicts["fsdp"],
        ),
        Strategy(
            "tensor_parallel",
            (*DIVIDED, "draw", "mix", "feed", "gather_parameters"),
            *_of(tensor_parallel),
            calls=("positions",),
            ranks=True,
            conflicts=conflicts["tensors"],
        ),
        Strategy(
            "megatron_sequence_parallel",
            (*DIVIDED, "draw", "add_positions", "mix", "feed", "gather_parameters"),
            *_of(megatron_sequence_parallel),
            ranks=True,
            conflicts=conflicts["tensors"],
        ),
        Strategy(
            "ulysses",
            (*DIVIDED, "mix", "positions"),
            *_of(ulysses),
            calls=("attend",),
            ranks=True,
            aliases=("sequence_parallel",),
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
            calls=("add_positions",),
            probe={"chunk": 23},
            ranks=True,
            conflicts=conflicts["vocabulary"],
        ),
    ]
