"""Keep one second moment for each block of a tensor instead of each element; pay steps that a block shares.

Peak: a little more than 4 bytes of moments for each parameter instead of 8. Blocks are those of Zhang et al., 2024
(arXiv:2406.16793): a head of the queries and keys, an output of every other matrix, a row of the embedding, of the
positions and of the head, and a vector as a whole. The second moment follows the mean of the squares of a block; all
else is AdamW.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, optimizers, update_rules


def blocks_of(shape: Any, name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the second moment of a tensor: [rows, 1], or [groups of columns], or [1] for all of it."""
    short = name.rpartition(".")[2]
    if len(sizes) != 2:
        return (1,)
    if not update_rules.is_hidden(short, 2):
        return (sizes[0], 1)
    heads = {"wq": getattr(shape, "heads", 0), "wk": getattr(shape, "key_heads", 0)}.get(short, 0)
    return (heads or sizes[1],)


def on_torch(parts: Parts) -> Parts:
    import torch

    def begin(name: str, p: Any) -> list[Any]:
        return [torch.zeros_like(p), p.new_zeros(blocks_of(parts.shape, name, tuple(p.shape)))]

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        m, v = moments
        m.lerp_(g.to(m.dtype), 1 - optimizers.BETA_1)
        squares = torch.square(g)
        if v.dim() == 2:
            v.lerp_(squares.mean(1, keepdim=True), 1 - optimizers.BETA_2)
            scale = v
        else:
            v.lerp_(squares.view(-1, len(v), p.shape[-1] // len(v)).mean((0, 2)), 1 - optimizers.BETA_2)
            scale = v.repeat_interleave(p.shape[-1] // len(v))
        del squares
        scale = (scale / (1 - optimizers.BETA_2**turn.steps)).sqrt_().add_(optimizers.EPSILON)
        p.mul_(turn.shrink()).addcdiv_(m, scale, value=-turn.rate / (1 - optimizers.BETA_1**turn.steps))

    return update_rules.in_torch(parts, begin, move)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    def begin(name: str, p: Any) -> Any:
        return {"m": jnp.zeros_like(p), "v": jnp.zeros(blocks_of(parts.shape, name, p.shape), p.dtype)}

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: Any) -> tuple[Any, Any]:
        count = turn.steps.astype(jnp.promote_types(p.dtype, jnp.float32))
        m, v = moments["m"], moments["v"]
        m = m + (1 - optimizers.BETA_1) * (g - m)
        if v.ndim == 2:
            v = v + (1 - optimizers.BETA_2) * (jnp.square(g).mean(1, keepdims=True) - v)
            scale = v
        else:
            means = jnp.square(g).reshape(-1, len(v), p.shape[-1] // len(v)).mean((0, 2))
            v = v + (1 - optimizers.BETA_2) * (means - v)
            scale = jnp.repeat(v, p.shape[-1] // len(v))
        scale = jnp.sqrt(scale / (1 - optimizers.BETA_2**count)) + optimizers.EPSILON
        new = p * turn.shrink() - turn.rate / (1 - optimizers.BETA_1**count) * m / scale
        return new.astype(p.dtype), {"m": m.astype(p.dtype), "v": v.astype(p.dtype)}

    return update_rules.in_jax(parts, begin, move)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "adam_mini",
            rewrites=("init", "update"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
