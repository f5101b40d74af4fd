"""Keep the input of each layer and what `mix` gave, named for the compiler; recompute the rest in the backward pass.

Peak: two hidden states a layer and what one block saves: one hidden state more than `checkpoint`. What follows `mix` is
recomputed without its last products; its own backward pass needs its insides again. JAX only: `checkpoint_name` and the
policy `save_only_these_names`. In torch a policy sees operators, not names: `selective_checkpoint`.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.activations._recomputed import recomputed_in_jax

NAME = "mixed"


def on_jax(parts: Parts) -> Parts:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    inner_mix = parts.mix
    policy = jax.checkpoint_policies.save_only_these_names(NAME)

    def mix(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return checkpoint_name(inner_mix(parts, p, x_BTD), NAME)

    return replace(parts, mix=mix, block=recomputed_in_jax(parts.block, policy))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("named_checkpoint", rewrites=("mix", "block"), on={"jax": on_jax}, about=__doc__)]
