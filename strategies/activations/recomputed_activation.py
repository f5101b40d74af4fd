"""Keep of the feed part what its first products gave, and recompute the activation function from it.

Peak: one wide tensor a layer instead of two under GELU, two instead of four under SwiGLU; no matrix product is computed
twice, so the time is that of an elementwise pass. Liger's SwiGLU and Megatron's recomputation of the activation
function do the same by kernels. In torch a policy saves the products whose result has another width than the model (of
the same width they are computed twice), and of experts the last ones too, which the gradient of their router reads; in
JAX `dots_with_no_batch_dims_saveable` saves products of weights, of which the backward pass needs no others.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.activations._recomputed import recomputed_in_jax


def on_torch(parts: Parts) -> Parts:
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}
    inner = parts.feed

    def policy(width: int, context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        wide = function in products and args[-1].shape[-1] != width
        saved = wide or function is aten._grouped_mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, x_BTD.shape[-1]))
        return checkpoint(inner, parts, p, x_BTD, use_reentrant=False, context_fn=contexts)

    return replace(parts, feed=feed)


def on_jax(parts: Parts) -> Parts:
    import jax

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return replace(parts, feed=recomputed_in_jax(parts.feed, policy))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "recomputed_activation",
            rewrites=("feed",),
            calls=("grad",),  # what has no backward pass has nothing to recompute
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
        )
    ]
