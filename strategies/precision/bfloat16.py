"""Keep parameters, gradients, moments and activations in bfloat16; pay with 8 bits of precision.

Half of every tensor: 8 bytes per parameter under AdamW instead of 16. Each parameter is cast as it is drawn, so no
second copy exists. Norms, softmax and the loss stay in float32. Updates below about 1/256 of a weight are lost.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    import torch

    inner = parts.draw

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        return inner(parts, name, shape, deviation).to(torch.bfloat16)

    return replace(parts, draw=draw)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    inner = parts.draw

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        return inner(parts, name, shape, deviation).astype(jnp.bfloat16)

    return replace(parts, draw=draw)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "bfloat16", rewrites=("draw",), on={"torch": on_torch, "jax": on_jax}, about=__doc__, precision="bfloat16"
        )
    ]
