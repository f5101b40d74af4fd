"""Run Adam in the eigenbasis of Shampoo's preconditioners for the matrices of the layers; pay more memory, not less.

Peak: besides Adam's moments 8 bytes for the square of each side of a matrix, and while one is updated the products of
both bases: a control for the table, as it costs. The bases follow the products of gradients with themselves. They are
made at the first step, which moves nothing (in its own basis a gradient is diagonal, and all else of it rounding), and
turned by one step of power iteration and QR each `every` steps (Vyas et al., 2024, arXiv:2409.11321). The first moment
is kept as it is and turned, the second in the basis: before a turn, which brings the largest direction to the front,
the directions are sorted by their size, and the second moment with them. Vectors, the embedding and the head are
updated by AdamW.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, optimizers, update_rules

FOLLOW = 0.95
"""By how much both moments and preconditioners keep of what they were."""


def refuse_narrow(name: str, dtype: Any) -> None:
    """Refuse a matrix of a type that no framework decomposes."""
    if dtype.itemsize < 4:
        raise ValueError(
            f"soap: '{name}' is stored in {8 * dtype.itemsize} bits, in which no matrix can be decomposed: keep "
            "parameters in float32 and use bfloat16_autocast"
        )


def on_torch(parts: Parts, every: int = 10) -> Parts:
    import torch

    knobs.above_0("soap", every=every)

    def begin(name: str, p: Any) -> list[Any]:
        moments = [torch.zeros_like(p), torch.zeros_like(p)]
        if not update_rules.is_hidden(name, p.dim()):
            return moments
        refuse_narrow(name, p.dtype)
        rows, columns = p.shape
        return [*moments, *(p.new_zeros(side, side) for side in (rows, columns, rows, columns))]

    def follow(preconditioner: Any, basis: Any, v: Any, side: int, steps: int) -> None:
        """Turn a basis in place when it is time, and sort the second moment along its side of the matrix."""
        if steps == 1:
            basis.copy_(torch.linalg.eigh(preconditioner)[1].flip(1))
        elif steps % every == 0:
            iterated = preconditioner @ basis
            order = (basis * iterated).sum(0).argsort(descending=True)
            basis.copy_(torch.linalg.qr(iterated.index_select(1, order))[0])
            v.copy_(v.index_select(side, order))

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        if len(moments) == 2:
            optimizers.adamw_in_torch(p, g, moments[0], moments[1], turn.steps, turn.rate, turn.decay)
            return
        m, v, left, right, by_left, by_right = moments
        if turn.steps > 1:
            m.lerp_(g, 1 - FOLLOW)
            v.lerp_((by_left.mT @ g @ by_right).square_(), 1 - FOLLOW)
            share = 1 - FOLLOW ** (turn.steps - 1)
            change = (by_left.mT @ m @ by_right).div_(share)
            change.div_((v / share).sqrt_().add_(optimizers.EPSILON))
            p.mul_(turn.shrink()).add_(by_left @ change @ by_right.mT, alpha=-turn.rate)
            del change
        left.lerp_(g @ g.mT, 1 - FOLLOW)
        right.lerp_(g.mT @ g, 1 - FOLLOW)
        follow(left, by_left, v, 0, turn.steps)
        follow(right, by_right, v, 1, turn.steps)

    return update_rules.in_torch(parts, begin, move)


def on_jax(parts: Parts, every: int = 10) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("soap", every=every)

    def begin(name: str, p: Any) -> Any:
        moments = {"m": jnp.zeros_like(p), "v": jnp.zeros_like(p)}
        if not update_rules.is_hidden(name, p.ndim):
            return moments
        refuse_narrow(name, p.dtype)
        rows, columns = p.shape
        sides = {"left": rows, "right": columns, "by_left": rows, "by_right": columns}
        return moments | {key: jnp.zeros((side, side), p.dtype) for key, side in sides.items()}

    def followed(preconditioner: Any, basis: Any, v: Any, side: int, steps: Any) -> tuple[Any, Any]:
        """Return a basis, turned when it is time, and the second moment, sorted along its side of the matrix."""

        def turned() -> tuple[Any, Any]:
            iterated = preconditioner @ basis
            order = jnp.argsort((basis * iterated).sum(0), descending=True)
            return jnp.linalg.qr(iterated[:, order])[0], jnp.take(v, order, side)

        return jax.lax.cond(
            steps == 1,
            lambda: (jnp.linalg.eigh(preconditioner)[1][:, ::-1], v),
            lambda: jax.lax.cond(steps % every == 0, turned, lambda: (basis, v)),
        )

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: Any) -> tuple[Any, Any]:
        m, v = moments["m"], moments["v"]
        if "left" not in moments:
            new, m, v = optimizers.adamw_in_jax(p, g, m, v, turn.steps, turn.rate, turn.decay)
            return new, {"m": m, "v": v}
        by_left, by_right, first = moments["by_left"], moments["by_right"], turn.steps == 1
        m = jnp.where(first, m, FOLLOW * m + (1 - FOLLOW) * g)
        squares = jnp.square(by_left.T @ g @ by_right)
        v = jnp.where(first, v, FOLLOW * v + (1 - FOLLOW) * squares)
        share = jnp.where(first, 1, 1 - FOLLOW ** (turn.steps - 1).astype(p.dtype))
        change = (by_left.T @ m @ by_right) / share / (jnp.sqrt(v / share) + optimizers.EPSILON)
        new = jnp.where(first, p, p * turn.shrink() - turn.rate * (by_left @ change @ by_right.T))
        left = FOLLOW * moments["left"] + (1 - FOLLOW) * g @ g.T
        right = FOLLOW * moments["right"] + (1 - FOLLOW) * g.T @ g
        by_left, v = followed(left, by_left, v, 0, turn.steps)
        by_right, v = followed(right, by_right, v, 1, turn.steps)
        return new, {"m": m, "v": v, "left": left, "right": right, "by_left": by_left, "by_right": by_right}

    return update_rules.in_jax(parts, begin, move)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "soap",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            probe={"every": 3},
            conflicts={
                "mapped_moments": "it takes slices of rows, and the rule looks at whole matrices",
                "before bfloat16": "the decompositions of its matrices have no form in 16 bits: use bfloat16_autocast",
            },
        )
    ]
