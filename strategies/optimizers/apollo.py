"""Scale each channel of a gradient as Adam would in a random space, `rank` high; pay random numbers at each step.

Peak: 8 * rank bytes of moments for each element of the longer side of a layer's matrix, instead of 8 for each element;
no SVD and no projector, which is drawn anew from its seed at each step. A channel is a row or a column along the longer
side: its scale is the norm of Adam's update of the projected gradient over the norm of that gradient. The norm of the
whole may grow by 1 % a step (Zhu et al., 2024, arXiv:2412.05270). The seed changes each `every` steps. A matrix whose
shorter side is no longer than `rank`, vectors, the embedding and the head are updated by AdamW.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, optimizers, update_rules
from strategies.optimizers.galore import is_projected, small

GROWTH = 1.01
TINY = 1e-30


def on_torch(parts: Parts, rank: int = 128, every: int = 200) -> Parts:
    import torch

    knobs.above_0("apollo", rank=rank, every=every)

    def begin(name: str, p: Any) -> list[Any]:
        if not is_projected(name, tuple(p.shape), rank):
            return [torch.zeros_like(p), torch.zeros_like(p)]
        sizes = small(tuple(p.shape), rank)
        return [p.new_zeros(sizes), p.new_zeros(sizes), p.new_zeros(())]

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        if len(moments) == 2:
            optimizers.adamw_in_torch(p, g, moments[0], moments[1], turn.steps, turn.rate, turn.decay)
            return
        m, v, norm = moments
        side = 0 if p.shape[0] <= p.shape[1] else 1
        seed = torch.Generator(device=p.device).manual_seed((turn.steps - 1) // every)
        drawn = torch.randn(p.shape[side], rank, generator=seed, device=p.device, dtype=p.dtype).div_(rank**0.5)
        low = drawn.mT @ g if side == 0 else g @ drawn
        change = torch.zeros_like(m)
        optimizers.adamw_in_torch(change, low, m, v, turn.steps, 1.0, 0.0)
        scale = change.norm(dim=side, keepdim=True) / low.norm(dim=side, keepdim=True).clamp(min=TINY)
        change = g * scale
        now = change.norm()
        limit = torch.where(norm > 0, (GROWTH * norm / now.clamp(min=TINY)).clamp(max=1.0), 1.0)
        norm.copy_(now * limit)
        p.mul_(turn.shrink()).sub_(change.mul_(turn.rate * limit))

    return update_rules.in_torch(parts, begin, move)


def on_jax(parts: Parts, rank: int = 128, every: int = 200) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("apollo", rank=rank, every=every)

    def begin(name: str, p: Any) -> Any:
        if not is_projected(name, p.shape, rank):
            return {"m": jnp.zeros_like(p), "v": jnp.zeros_like(p)}
        sizes = small(p.shape, rank)
        return {"m": jnp.zeros(sizes, p.dtype), "v": jnp.zeros(sizes, p.dtype), "norm": jnp.zeros((), p.dtype)}

    def norm_of(x: Any, axis: int) -> Any:
        return jnp.sqrt(jnp.square(x).sum(axis, keepdims=True))

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: Any) -> tuple[Any, Any]:
        m, v = moments["m"], moments["v"]
        if "norm" not in moments:
            new, m, v = optimizers.adamw_in_jax(p, g, m, v, turn.steps, turn.rate, turn.decay)
            return new, {"m": m, "v": v}
        side = 0 if p.shape[0] <= p.shape[1] else 1
        drawn = jax.random.normal(jax.random.key((turn.steps - 1) // every), (p.shape[side], rank), p.dtype) / rank**0.5
        low = drawn.T @ g if side == 0 else g @ drawn
        change, m, v = optimizers.adamw_in_jax(jnp.zeros_like(low), low, m, v, turn.steps, 1.0, 0.0)
        change = g * norm_of(change, side) / jnp.maximum(norm_of(low, side), TINY)
        norm, now = moments["norm"], jnp.sqrt(jnp.square(change).sum())
        limit = jnp.where(norm > 0, jnp.minimum(1.0, GROWTH * norm / jnp.maximum(now, TINY)), 1.0)
        new = p * turn.shrink() - turn.rate * limit * change
        return new.astype(p.dtype), {"m": m, "v": v, "norm": (now * limit).astype(p.dtype)}

    return update_rules.in_jax(parts, begin, move)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "apollo",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"rank": 4, "every": 3},
        )
    ]
