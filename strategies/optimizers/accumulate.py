"""Sum the gradients of pieces of a batch; keep the activations of one piece, run the model for each.

Peak: activations of a `pieces`-th of the batch, and one more set of gradients while they are added. Each piece counts
by the targets in it that carry loss, so that the mean over the pieces is the mean over the tokens: a mean of means is
wrong as soon as rows are padded. A batch of fewer rows than `pieces` is cut into rows. Gradients are added in their own
type: where sums are to be wide take `float32_master`, named before it, in place of bfloat16 parameters.
"""

from dataclasses import replace
from typing import Any

from harness import IGNORED, Parts, Strategy, hookimpl, knobs, tree


def on_torch(parts: Parts, pieces: int = 4) -> Parts:
    import torch

    knobs.above_0("accumulate", pieces=pieces)
    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        size = -(-len(x) // pieces)
        total = (y != IGNORED).sum()
        loss, sums = None, None
        for x_b, y_b in zip(x.split(size), y.split(size), strict=True):
            value, grads = inner(parts, state, x_b, y_b)
            share = (y_b != IGNORED).sum() / total
            value = torch.where(share > 0, value * share, 0)  # a piece without a target has no loss at all
            loss = value if loss is None else loss + value
            sums = added(sums, grads, share)
            del grads
        return loss, sums

    def added(sums: Any, grads: Any, share: Any) -> Any:
        """Add `share` of each gradient in place, leaf by leaf: a second set of them would be alive otherwise."""

        def weighed(g: Any) -> Any:
            return g.mul_(share.to(g.dtype)).masked_fill_(~(share > 0), 0)

        return (
            tree.mapped(weighed, grads) if sums is None else tree.mapped(lambda g, of: of.add_(weighed(g)), grads, sums)
        )

    return replace(parts, grad=grad)


def on_jax(parts: Parts, pieces: int = 4) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("accumulate", pieces=pieces)
    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        size = -(-len(x) // pieces)
        count = -(-len(x) // size)
        padding = count * size - len(x)
        x_MB = jnp.pad(x, ((0, padding), *((0, 0) for _ in x.shape[1:]))).reshape(count, size, *x.shape[1:])
        y_MB = jnp.pad(y, ((0, padding), (0, 0)), constant_values=IGNORED).reshape(count, size, *y.shape[1:])
        total = (y != IGNORED).sum()

        def piece(so_far: Any, turn: Any) -> Any:
            x_B, y_B = turn
            share = (y_B != IGNORED).sum() / total
            value, grads = inner(parts, state, x_B, y_B)

            def weighed(of: Any) -> Any:
                return jnp.where(share > 0, of * share.astype(of.dtype), 0)  # without a target there is no loss

            loss, sums = so_far
            return (loss + weighed(value), jax.tree.map(lambda a, g: a + weighed(g), sums, grads)), None

        shapes = jax.eval_shape(lambda x, y: inner(parts, state, x, y), x_MB[0], y_MB[0])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(piece, zeros, (x_MB, y_MB))[0]

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "accumulate",
            rewrites=("grad",),
            calls=("grad",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"pieces": 2},
            conflicts={
                "before truncated_bptt": "each piece would begin with the states of another piece's rows: name it after"
            },
        )
    ]
