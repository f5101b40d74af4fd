"""Recompute the part across tokens in the backward pass; keep only its input, and run attention twice.

Peak: queries, keys, values and what attention saves of one layer instead of all of them. What works within a token
stays as it is, so that this pays where sequences are long and layers narrow. Source: selective recomputation of
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022, arXiv:2205.05198).
"""

from dataclasses import replace
from functools import partial

from harness import Strategy, hookimpl


def on_torch(parts):
    from torch.utils.checkpoint import checkpoint

    inner = parts.mix

    def mix(parts, p, x_BTD):
        return checkpoint(inner, parts, p, x_BTD, use_reentrant=False)

    return replace(parts, mix=mix)


def on_jax(parts):
    import jax

    inner = parts.mix

    def mix(parts, p, x_BTD):
        return jax.checkpoint(partial(inner, parts), prevent_cse=False)(p, x_BTD)

    return replace(parts, mix=mix)


@hookimpl
def harness_strategies():
    return [Strategy("checkpoint_mix", rewrites=("mix",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
