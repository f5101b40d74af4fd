"""Apply each gradient as soon as it is made and drop it; keep one gradient instead of all, forgo a norm over them.

torch: a hook on each parameter gets its finished gradient (of tied weights, the sum), hands it to `update` alone, and
puts a tensor without memory in its place. Peak: the gradients less all but the largest of those alive at once.

JAX: the backward pass is a loop over the layers that carries parameters and moments, so that they are changed in place:
one layer's gradient at a time. The loop starts from the input of each layer and computes the layer again, as a
checkpoint of every layer does: that costs a second forward pass, and saves activations besides. A scan over stacked
parameters would hold them twice.

Strategies of embed, block, stack, loss and of an update that treats each tensor by itself go with it. What takes the
gradient of anything but the whole batch, or changes it afterwards (accumulation, loss scales, cast parameters), does
not, and is refused: a gradient that is applied can be neither added to nor scaled. (LOMO: Lv et al., 2023,
arXiv:2306.09782.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl

REFUSED = (
    "an update in the backward pass ('update_in_backward', 'clip_in_backward', 'lomo') applies each gradient at once, "
    "but another strategy {how}: leave out one of the two (accumulate, clip_gradients, float16_scaled, float16_master "
    "and float32_master do not go with it)"
)


def watched(parts: Parts, batch: Any) -> Parts:
    """Make the embedding refuse a gradient that is not that of the whole batch and of the loss as it is."""

    def embed(inside: Parts, params: Any, x: Any) -> Any:
        if x is not batch:
            raise ValueError(REFUSED.format(how="takes the gradient of pieces of the batch"))
        if inside.loss is not parts.loss:
            raise ValueError(REFUSED.format(how="scales the loss"))
        return parts.embed(inside, params, x)

    return replace(parts, embed=embed)


def on_torch(parts: Parts) -> Parts:
    from strategies.optimizers.update_in_backward._torch import step

    return replace(parts, step=step)


def on_jax(parts: Parts) -> Parts:
    from strategies.optimizers.update_in_backward._jax import step

    return replace(parts, step=step)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "update_in_backward",
            rewrites=("step",),
            calls=("embed", "stack", "loss", "grad", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
        )
    ]
