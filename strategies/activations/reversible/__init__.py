"""Keep the two last hidden states of the stack alone; rebuild those of every layer in the backward pass, run once more.

Another architecture: two streams, both the input at first, with y1 = x1 + F(x2) and y2 = x2 + G(y1) in each layer and
their mean at the end, so that x2 = y2 - G(y1) and x1 = y1 - F(x2) can be computed. F is the block without its `feed`, G
the block without its `mix`, each less its input. Peak: a few hidden states and what one block saves, whatever the
depth. The streams are float32 at the least: what a layer adds must survive in them to be taken off again. Sources:
Gomez et al., "The Reversible Residual Network" (2017, arXiv:1707.04585); Kitaev et al., "Reformer" (2020,
arXiv:2001.04451). The layers must be deterministic.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

from harness import Parts, Strategy, hookimpl


def nothing(parts: Parts, p: Any, x_BTD: Any) -> Any:
    """Stand in for a branch that is left out: zeros, which a block may normalise."""
    return import_module("jax.numpy" if parts.place.backend == "jax" else "torch").zeros_like(x_BTD)


def branches(parts: Parts) -> tuple[Any, Any]:
    """Return F and G, functions of a layer's parameters and a hidden state."""

    def branch(alone: Parts) -> Any:
        return lambda p, x_BTD: alone.block(alone, p, x_BTD) - x_BTD

    return branch(replace(parts, feed=nothing)), branch(replace(parts, mix=nothing))


def on_torch(parts: Parts) -> Parts:
    if parts.mix is None or parts.feed is None:
        raise ValueError("reversible needs the parts `mix` and `feed` of a layer, and this model does not name both")
    from strategies.activations.reversible._torch import stack

    return replace(parts, stack=stack)


def on_jax(parts: Parts) -> Parts:
    if parts.mix is None or parts.feed is None:
        raise ValueError("reversible needs the parts `mix` and `feed` of a layer, and this model does not name both")
    from strategies.activations.reversible._jax import stack

    return replace(parts, stack=stack)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "reversible",
            rewrites=("stack",),
            calls=("mix", "feed"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            conflicts={
                **dict.fromkeys(
                    ("checkpoint", "nested_checkpoint", "budget_checkpoint"),
                    "both run the layers in a way of their own, and reversible keeps nothing of them: leave it out",
                ),
                **dict.fromkeys(
                    ("update_in_backward", "clip_in_backward", "lomo"),
                    "layers would be updated before they are undone by what they were: leave out one of the two",
                ),
            },
        )
    ]
