"""Run the loss of each chunk forward and backward at once; keep no logits, but both gradients from then on.

The way of torchtitan's ChunkedLossWrapper: whatever computes the loss computes it of `chunk` rows, autograd makes their
gradients, and these are added up before the next chunk begins. Nothing is computed twice. Peak beyond inputs: 3 C V
elements of a chunk in float32, the gradient of the hidden states, and the gradient of the classifier twice, once of all
chunks so far in float32 and once of the chunk at hand. Both are of the *sum* of the losses until the end: what comes
from above and the number of targets that count are multiplied in there, so that a loss scale keeps float16 from
underflowing. A product of float16 sums up in it, whatever the loss scale: a chunk overflows whose rows of one target
add up to more than 65,504. There is no second derivative. `fused_loss` does the same by formulas, in place.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from harness import IGNORED, Parts, Strategy, alike, hookimpl, knobs
from strategies.loss.fused_loss import TILE

OfRows = Callable[..., Any]
"""The mean loss of some rows: `(x_CD, w_VD, y_C)`."""


def on_torch(parts: Parts, chunk: int = 1024) -> Parts:
    knobs.above_0("chunked_backward_loss", chunk=chunk)
    inner = parts.loss

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        import torch

        def of_rows(x_CD: Any, w_VD: Any, y_C: Any) -> Any:
            return inner(parts, x_CD[None], w_VD, y_C[None])

        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        grad = torch.is_grad_enabled()
        needs = grad and x_ND.requires_grad, grad and w_VD.requires_grad
        return _function().apply(x_ND, w_VD, y_N, chunk, of_rows, needs)

    return replace(parts, loss=loss)


@cache
def _function() -> Any:
    """Make the function once torch is there."""
    import torch

    def with_a_target(y_C: Any) -> Any:
        other_C = torch.cat([y_C.new_zeros(1), y_C[1:]])
        return torch.where((y_C != IGNORED).any(), y_C, other_C)

    class ChunkedBackward(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x_ND: Any, w_VD: Any, y_N: Any, chunk: int, of_rows: OfRows, needs: tuple[bool, bool]
        ) -> Any:
            wide = torch.promote_types(torch.promote_types(x_ND.dtype, w_VD.dtype), torch.float32)
            count = (y_N != IGNORED).sum().to(wide)
            total = torch.zeros((), dtype=wide, device=x_ND.device)
            dx_ND = torch.empty_like(x_ND) if needs[0] else None
            dw_VD = torch.zeros(w_VD.shape, dtype=wide, device=w_VD.device) if needs[1] else None
            w_VD = w_VD.detach().requires_grad_(needs[1])
            for start in alike(range(0, len(y_N), chunk), lambda start: min(chunk, len(y_N) - start)):
                rows = slice(start, start + chunk)
                x_CD = x_ND[rows].detach().requires_grad_(needs[0])
                with torch.set_grad_enabled(any(needs)):
                    summed = _summed(of_rows, x_CD, w_VD, y_N[rows], with_a_target(y_N[rows]))
                total += summed.detach()
                if any(needs):
                    wanted = [leaf for leaf in (x_CD, w_VD) if leaf.requires_grad]
                    grads = list(torch.autograd.grad(summed, wanted))
                    del summed
                    if dw_VD is not None:
                        dw_VD += grads.pop()
                    if dx_ND is not None:
                        dx_ND[rows] = grads.pop()
            ctx.save_for_backward(count, dx_ND, dw_VD)
            ctx.types = x_ND.dtype, w_VD.dtype
            return total / count

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            if torch.is_grad_enabled():  # create_graph=True: a gradient without a graph would pass for a constant
                raise RuntimeError("chunked_backward_loss has no second derivative: leave out create_graph")
            count, *gradients = ctx.saved_tensors
            factor = upstream / count.clamp(min=1)  # without a target that counts all gradients are 0
            scaled = (
                None if grad is None else _scaled_in_torch(grad, factor, dtype)
                for grad, dtype in zip(gradients, ctx.types, strict=True)
            )
            return *scaled, None, None, None, None

    return ChunkedBackward


def _scaled_in_torch(grad_ND: Any, factor: Any, dtype: Any) -> Any:
    """Return the gradients of the mean from those of the sum, in a type.

    The products are formed in the type of the factor, some rows at a time: a GPU would round it to 16 bits first.
    """
    scaled_ND = grad_ND.new_empty(grad_ND.shape, dtype=dtype)
    for rows, scaled in zip(grad_ND.split(TILE), scaled_ND.split(TILE), strict=True):
        scaled.copy_(rows.to(factor.dtype) * factor)
    return scaled_ND


def _summed(of_rows: OfRows, x_CD: Any, w_VD: Any, y_C: Any, aimed_C: Any) -> Any:
    """Return the sum of the losses of some rows; it is 0 where no target counts.

    A mean of none is no number: `aimed_C` are the targets, and where all are ignored the first of them is another.
    """
    return of_rows(x_CD, w_VD, aimed_C) * (y_C != IGNORED).sum()


def on_jax(parts: Parts, chunk: int = 1024) -> Parts:
    knobs.above_0("chunked_backward_loss", chunk=chunk)
    inner = parts.loss

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        def of_rows(x_CD: Any, w_VD: Any, y_C: Any) -> Any:
            return inner(parts, x_CD[None], w_VD, y_C[None])

        return _mean_in_jax(of_rows, chunk)(x_BTD.reshape(-1, x_BTD.shape[-1]), w_VD, y_BT.reshape(-1))

    return replace(parts, loss=loss)


def _mean_in_jax(of_rows: OfRows, chunk: int) -> OfRows:
    """Return the mean loss of all rows, whose gradients are made with it."""
    import jax
    import jax.numpy as jnp

    def pieces(x_ND: Any, y_N: Any) -> tuple[Any, Any]:
        size = min(chunk, len(y_N))
        padding = -len(y_N) % size
        x_MCD = jnp.pad(x_ND, ((0, padding), (0, 0))).reshape(-1, size, x_ND.shape[1])
        return x_MCD, jnp.pad(y_N, (0, padding), constant_values=IGNORED).reshape(-1, size)

    def with_a_target(y_C: Any) -> Any:
        return jnp.where((y_C != IGNORED).any(), y_C, y_C.at[0].set(0))

    @jax.custom_vjp
    def mean(x_ND: Any, w_VD: Any, y_N: Any) -> Any:
        wide = jnp.promote_types(x_ND.dtype, jnp.float32)

        def one(total: Any, rows: Any) -> Any:
            x_CD, y_C = rows
            return total + _summed(of_rows, x_CD, w_VD, y_C, with_a_target(y_C)).astype(wide), None

        total, _ = jax.lax.scan(one, jnp.zeros((), wide), pieces(x_ND, y_N))
        return total / (y_N != IGNORED).sum().astype(wide)

    def forward(x_ND: Any, w_VD: Any, y_N: Any) -> Any:
        wide = jnp.promote_types(x_ND.dtype, jnp.float32)
        with_gradients = jax.value_and_grad(partial(_summed, of_rows), argnums=(0, 1))

        def one(so_far: Any, rows: Any) -> Any:
            total, dw_VD = so_far
            x_CD, y_C = rows
            summed, (dx_CD, more_VD) = with_gradients(x_CD, w_VD, y_C, with_a_target(y_C))
            return (total + summed.astype(wide), dw_VD + more_VD), dx_CD

        start = jnp.zeros((), wide), jnp.zeros(w_VD.shape, wide)
        (total, dw_VD), dx_MCD = jax.lax.scan(one, start, pieces(x_ND, y_N))
        count = (y_N != IGNORED).sum().astype(wide)
        dx_ND = dx_MCD.reshape(-1, x_ND.shape[1])[: len(y_N)]
        return total / count, (count, dx_ND, dw_VD, jnp.empty((0,), w_VD.dtype))

    mean.defvjp(forward, _scaled_in_jax)
    return mean


def _scaled_in_jax(residuals: Any, upstream: Any) -> Any:
    """Return the gradients of the mean from those of the sum; without a target that counts all are 0."""
    import jax.numpy as jnp

    count, dx_ND, dw_VD, like_w = residuals
    factor = upstream / jnp.maximum(count, 1)
    return (dx_ND * factor).astype(dx_ND.dtype), (dw_VD * factor).astype(like_w.dtype), None


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "chunked_backward_loss",
            rewrites=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"chunk": 23},
        )
    ]
