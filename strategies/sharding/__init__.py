"""One run on several ranks: what each rank holds of the batch, the parameters, the moments and the activations."""

from harness import Strategy, hookimpl
from strategies.sharding import ddp, fsdp


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "ddp",
            rewrites=("share", "reduce"),
            on={"torch": ddp.on_torch, "jax": ddp.on_jax},
            about=ddp.__doc__ or "",
            ranks=True,
        ),
        Strategy(
            "fsdp",
            rewrites=("draw", "share", "grad", "reduce", "gather"),
            calls=("embed", "block", "loss"),
            on={"torch": fsdp.on_torch, "jax": fsdp.on_jax},
            about=fsdp.__doc__ or "",
            ranks=True,
        ),
    ]
