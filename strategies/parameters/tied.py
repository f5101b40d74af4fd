"""Let the head be the embedding; keep one matrix for both, pay another model.

Peak: 16 bytes under AdamW for each number of the head less. The gradient of the matrix is the sum of both uses (Press
and Wolf, 2017, arXiv:1608.05859). A model that is tied already stays as it is.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_any(parts: Parts) -> Parts:
    if getattr(parts.shape, "head_bias", False):
        raise ValueError("tied: an embedding has no bias for the head to share: leave `head_bias` out")
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        return inner(replace(parts, shape=parts.shape.model_copy(update={"tied": True})), source)

    return replace(parts, init=init)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "tied",
            rewrites=("init",),
            calls=("loss", "positions"),  # a decoder: other networks have no embedding to share
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            conflicts={"vocabulary_parallel_loss": "it divides what the shape says: set `tied: true` in the shape"},
        )
    ]
