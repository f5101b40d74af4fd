"""Keep what matrix products and attention gave in each layer, and recompute the rest; pay the cheap operations twice.

Peak: the outputs of the products instead of all activations, more than `checkpoint` keeps and less than nothing does.
In torch the policy of selective activation checkpointing saves every product and fused attention (Korthikanti et al.,
2022, arXiv:2205.05198); in JAX `dots_with_no_batch_dims_saveable` saves products of weights alone.
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
    saved = {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten._grouped_mm.default,  # of experts
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function is aten.unsafe_split.Tensor:
            raise ValueError(
                "selective_checkpoint: torch's GRU and LSTM change in place what their products gave, which would be "
                "saved: use checkpoint"
            )
        return CheckpointPolicy.MUST_SAVE if function in saved else CheckpointPolicy.PREFER_RECOMPUTE

    inner = parts.block
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return checkpoint(inner, parts, p, x_BTD, use_reentrant=False, context_fn=contexts)

    return replace(parts, block=block)


def on_jax(parts: Parts) -> Parts:
    import jax

    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return replace(parts, block=recomputed_in_jax(parts.block, policy))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "selective_checkpoint",
            rewrites=("block",),
            calls=("block",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            conflicts={
                "before int8_activations": "layers are recomputed without rounding their products: name it after"
            },
        )
    ]
