"""Shrink all gradients alike where their norm over all parameters exceeds `norm`; pay a pass over them.

Peak: nothing, as they are shrunk in place (on a CPU torch widens one of 16 bits at a time for its norm); but every
gradient has to be there before the first is applied, which rules out `update_in_backward`: `clip_in_backward` is for
that. (Pascanu et al., 2013, arXiv:1211.5063.)
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, tree

TINY = 1e-6


def norm_of(g: Any) -> Any:
    """Return the norm of a gradient, in 32 bits at the least."""
    import torch

    return g.norm(dtype=torch.promote_types(g.dtype, torch.float32))


def on_torch(parts: Parts, norm: float = 1.0) -> Parts:
    import torch

    knobs.above_0("clip_gradients", norm=norm)
    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        loss, grads = inner(parts, state, x, y)
        leaves = [g for _, g in tree.leaves(grads)]
        total = torch.stack([norm_of(g) for g in leaves]).norm()
        share = (norm / (total + TINY)).clamp(max=1.0)  # stays a tensor: to read it would wait for the device
        return loss, tree.mapped(lambda g: shrunk(g, share), grads)

    def shrunk(g: Any, share: Any) -> Any:
        """Shrink a gradient in place; one that takes no memory stays so."""
        if any(g.stride()) or g.dim() == 0:
            return g.mul_(share)
        return (g.as_strided((), ()) * share).to(g.dtype).expand(g.shape)

    return replace(parts, grad=grad)


def on_jax(parts: Parts, norm: float = 1.0) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("clip_gradients", norm=norm)
    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        loss, grads = inner(parts, state, x, y)
        wide = (g.astype(jnp.promote_types(g.dtype, jnp.float32)) for g in jax.tree.leaves(grads))
        total = jnp.sqrt(sum(jnp.square(g).sum() for g in wide))
        share = jnp.minimum(1.0, norm / (total + TINY))
        return loss, jax.tree.map(lambda g: (g * share).astype(g.dtype), grads)

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "clip_gradients",
            rewrites=("grad",),
            calls=("grad",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"norm": 0.1},
            conflicts={
                **dict.fromkeys(
                    ("zero1", "zero2", "fsdp", "tensor_parallel", "megatron_sequence_parallel"),
                    "each rank would take the norm of its own part, and shrink by another share",
                ),
                **dict.fromkeys(
                    ("update_in_backward", "lomo"),
                    "layers are updated before the norm of all gradients is known: use clip_in_backward",
                ),
                "vocabulary_parallel_loss": "each rank would take the norm of its rows, and shrink by another share",
                "sparse_embedding_gradient": "the norm would be that of a row for each token, and not of their sums",
                **dict.fromkeys(
                    ("before float16_scaled", "before float16_master"),
                    "it would shrink gradients while they are scaled: name it after",
                ),
                "before accumulate": "it would shrink each piece of the batch alone: name it after",
                "before truncated_bptt": "it would shrink the gradients of each stretch alone: name it after",
            },
        )
    ]
