"""Keep Adam's moments of a projected gradient, `rank` high, for the matrices of the layers; pay an SVD every so often.

Peak: 8 * rank bytes of moments for each element of the longer side and 4 * rank for each of the shorter, instead of 8
for each element; while an SVD is made, its scratch on one matrix. The projector holds the first singular vectors of the
gradient's shorter side and is made anew each `every` steps; moments stay as they are then. The update is Adam's in the
small space, projected back and multiplied by `scale` (Zhao et al., 2024, arXiv:2403.03507). A matrix whose shorter side
is no longer than `rank`, vectors, the embedding and the head are updated by AdamW.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, optimizers, update_rules


def is_projected(name: str, sizes: tuple[int, ...], rank: int) -> bool:
    """Return whether the moments of a tensor are those of its projection."""
    return update_rules.is_hidden(name, len(sizes)) and min(sizes) > rank


def small(sizes: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return the sizes of a projected gradient: its shorter side becomes the rank."""
    rows, columns = sizes
    return (rank, columns) if rows <= columns else (rows, rank)


def on_torch(parts: Parts, rank: int = 128, every: int = 200, scale: float = 0.25) -> Parts:
    import torch

    knobs.above_0("galore", rank=rank, every=every, scale=scale)

    def begin(name: str, p: Any) -> list[Any]:
        if not is_projected(name, tuple(p.shape), rank):
            return [torch.zeros_like(p), torch.zeros_like(p)]
        sizes = small(tuple(p.shape), rank)
        return [p.new_zeros(sizes), p.new_zeros(sizes), p.new_zeros(min(p.shape), rank)]

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        if len(moments) == 2:
            optimizers.adamw_in_torch(p, g, moments[0], moments[1], turn.steps, turn.rate, turn.decay)
            return
        m, v, projector = moments
        wide = p.shape[0] <= p.shape[1]
        if turn.steps % every == 1 or every == 1:
            left, _, right = torch.linalg.svd(g.float(), full_matrices=False)
            projector.copy_((left if wide else right.mT)[:, :rank])
            del left, right
        change = torch.zeros_like(m)
        optimizers.adamw_in_torch(change, projector.mT @ g if wide else g @ projector, m, v, turn.steps, turn.rate, 0.0)
        p.mul_(turn.shrink())
        if wide:
            p.addmm_(projector, change, alpha=scale)
        else:
            p.addmm_(change, projector.mT, alpha=scale)

    return update_rules.in_torch(parts, begin, move)


def on_jax(parts: Parts, rank: int = 128, every: int = 200, scale: float = 0.25) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("galore", rank=rank, every=every, scale=scale)

    def begin(name: str, p: Any) -> Any:
        if not is_projected(name, p.shape, rank):
            return {"m": jnp.zeros_like(p), "v": jnp.zeros_like(p)}
        sizes = small(p.shape, rank)
        projector = jnp.zeros((min(p.shape), rank), p.dtype)
        return {"m": jnp.zeros(sizes, p.dtype), "v": jnp.zeros(sizes, p.dtype), "projector": projector}

    def anew(g: Any) -> Any:
        wide = g.shape[0] <= g.shape[1]
        left, _, right = jnp.linalg.svd(g.astype(jnp.float32), full_matrices=False)
        return (left if wide else right.T)[:, :rank].astype(g.dtype)

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: Any) -> tuple[Any, Any]:
        m, v = moments["m"], moments["v"]
        if "projector" not in moments:
            new, m, v = optimizers.adamw_in_jax(p, g, m, v, turn.steps, turn.rate, turn.decay)
            return new, {"m": m, "v": v}
        projector = jax.lax.cond((turn.steps - 1) % every == 0, anew, lambda g: moments["projector"], g)
        wide = p.shape[0] <= p.shape[1]
        low = projector.T @ g if wide else g @ projector
        change, m, v = optimizers.adamw_in_jax(jnp.zeros_like(low), low, m, v, turn.steps, turn.rate, 0.0)
        whole = projector @ change if wide else change @ projector.T
        return (p * turn.shrink() + scale * whole).astype(p.dtype), {"m": m, "v": v, "projector": projector}

    return update_rules.in_jax(parts, begin, move)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "galore",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"rank": 4, "every": 3},
        )
    ]
