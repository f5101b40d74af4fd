"""Keep one second moment for each block of a tensor instead of each element; pay steps that a block shares.

Peak: a little more than 4 bytes of moments for each parameter instead of 8. Blocks are those of Zhang et al., 2024
(arXiv:2406.16793): a head of `wq` and `wk` (in published and own models, which name them otherwise, an output), an
output of every other matrix (of each expert, where these are stacked), a row of the embedding, of the positions and of
the head, and a vector as a whole. The second moment follows the mean of the squares of a block; all else is AdamW.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from harness import Parts, Strategy, hookimpl, optimizers, update_rules


class Layout(NamedTuple):
    """How a model stores its matrices: by name, whether outputs stand first; heads of queries and keys, 0 for none."""

    outputs_first: Callable[[str], bool]
    heads: int
    key_heads: int

    @classmethod
    def of(cls, parts: Parts) -> "Layout":
        return cls(parts.outputs_first, getattr(parts.shape, "heads", 0), getattr(parts.shape, "key_heads", 0))

    def blocks(self, name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the second moment of a tensor: 1 along what a block has whole.

        Columns may be in groups.
        """
        if len(sizes) < 2:
            return (1,)
        if not optimizers.of_layers(name) or self.outputs_first(name):
            return (*sizes[:-1], 1)
        heads = {"wq": self.heads, "wk": self.key_heads}.get(name.rpartition(".")[2], 0)
        return (*sizes[:-2], 1, heads or sizes[-1])


def grouped(squares: Any, sizes: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """Return squares with their columns in groups, and the axes of a block in them."""
    axes = (*(at for at, size in enumerate(sizes) if size == 1), len(sizes))
    return squares.reshape(*squares.shape[:-1], sizes[-1], -1), axes


def width(p: Any, sizes: tuple[int, ...]) -> int:
    """Return how often a number of the second moment stands beside itself, where that is not left to broadcasting."""
    return 1 if sizes[-1] == 1 else int(p.shape[-1]) // sizes[-1]


def on_torch(parts: Parts) -> Parts:
    import torch

    layout = Layout.of(parts)

    def begin(name: str, p: Any) -> list[Any]:
        return [torch.zeros_like(p), p.new_zeros(layout.blocks(name, tuple(p.shape)))]

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        m, v = moments
        m.lerp_(g.to(m.dtype), 1 - optimizers.BETA_1)
        squares, axes = grouped(torch.square(g), tuple(v.shape))
        v.lerp_(squares.mean(axes, keepdim=True).squeeze(-1), 1 - optimizers.BETA_2)
        del squares
        scale = v.repeat_interleave(width(p, tuple(v.shape)), -1)
        scale = (scale / (1 - optimizers.BETA_2**turn.steps)).sqrt_().add_(optimizers.EPSILON)
        rate = turn.rate / (1 - optimizers.BETA_1**turn.steps)
        torch.atleast_1d(p).mul_(turn.shrink()).addcdiv_(m, scale, value=-rate)

    return update_rules.in_torch(parts, begin, move)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    layout = Layout.of(parts)

    def begin(name: str, p: Any) -> Any:
        return {"m": jnp.zeros_like(p), "v": jnp.zeros(layout.blocks(name, p.shape), p.dtype)}

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: Any) -> tuple[Any, Any]:
        count = turn.steps.astype(jnp.promote_types(p.dtype, jnp.float32))
        m, v = moments["m"], moments["v"]
        m = m + (1 - optimizers.BETA_1) * (g - m)
        squares, axes = grouped(jnp.square(g), v.shape)
        v = v + (1 - optimizers.BETA_2) * (squares.mean(axes, keepdims=True)[..., 0] - v)
        scale = jnp.repeat(v, width(p, v.shape), -1)
        scale = jnp.sqrt(scale / (1 - optimizers.BETA_2**count)) + optimizers.EPSILON
        new = p * turn.shrink() - turn.rate / (1 - optimizers.BETA_1**count) * m / scale
        return new.reshape(p.shape).astype(p.dtype), {"m": m.astype(p.dtype), "v": v.astype(p.dtype)}

    return update_rules.in_jax(parts, begin, move)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "adam_mini",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
