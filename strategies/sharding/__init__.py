"""One run on several ranks: what each rank holds of the batch, the parameters, the moments and the activations."""

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

DIVIDED = ("share", "reduce")


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy("ddp", DIVIDED, {"torch": ddp.on_torch}, ddp.__doc__ or "", ranks=True),
        Strategy("zero1", (*DIVIDED, "gather", "update"), {"torch": zero1.on_torch}, zero1.__doc__ or "", ranks=True),
        Strategy(
            "fsdp",
            (*DIVIDED, "draw", "grad", "gather"),
            {"torch": fsdp.on_torch},
            fsdp.__doc__ or "",
            calls=("embed", "block", "loss"),
            ranks=True,
        ),
        Strategy(
            "tensor_parallel",
            (*DIVIDED, "draw", "mix", "feed", "gather"),
            {"torch": tensor_parallel.on_torch},
            tensor_parallel.__doc__ or "",
            ranks=True,
        ),
        Strategy(
            "sequence_parallel",
            (*DIVIDED, "mix", "positions"),
            {"torch": sequence_parallel.on_torch},
            sequence_parallel.__doc__ or "",
            calls=("attend",),
            ranks=True,
        ),
        Strategy(
            "ring_attention",
            (*DIVIDED, "attend", "positions"),
            {"torch": ring_attention.in_torch},
            ring_attention.__doc__ or "",
            ranks=True,
        ),
        Strategy(
            "vocabulary_parallel_loss",
            (*DIVIDED, "draw", "embed", "loss", "gather"),
            {"torch": vocabulary_parallel_loss.in_torch},
            vocabulary_parallel_loss.__doc__ or "",
            probe={"chunk": 23},
            ranks=True,
        ),
    ]
