"""The cut loss as one `jax.custom_vjp` of scans: over chunks of rows, and within them over tiles of the vocabulary."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from harness import IGNORED, Objective
from strategies.loss.fused_loss import HALF

Array = jax.Array
PLAIN = Objective()


def cut_loss(x_BTD: Array, w_VD: Array, y_BT: Array, rows: int, tile: int, objective: Objective = PLAIN) -> Array:
    """Return the mean loss of the logits `x @ w.T` against `y`, in float32 (float64 for float64 inputs).

    `x_BTD` is [..., D], `w_VD` [V, D], `y_BT` [...]. The mean is over targets other than -100, NaN if there are none.
    """
    return _cut_loss(rows, tile, objective, x_BTD.reshape(-1, x_BTD.shape[-1]), w_VD, y_BT.reshape(-1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cut_loss(rows: int, tile: int, objective: Objective, x_nD: Array, w_VD: Array, y_n: Array) -> Array:
    return _forward(rows, tile, objective, x_nD, w_VD, y_n)[0]


def _pieces(array: Array, size: int, fill: Any) -> Array:
    """Cut the first axis into even pieces of at most `size`, the last one filled up where no number of them divides it.

    An array that is filled up is copied whole: up to twice as many pieces are better.
    """
    least = max(1, -(-len(array) // size))
    count = next((count for count in range(least, 2 * least + 1) if len(array) % count == 0), least)
    even = -(-len(array) // count)
    padding = [(0, count * even - len(array)), *((0, 0) for _ in array.shape[1:])]
    return jnp.pad(array, padding, constant_values=fill).reshape(count, even, *array.shape[1:])


def _logits(x_CD: Array, w_tD: Array, cap: float) -> Array:
    """Multiply a tile, in float32 at the least, and bend it to stay within `cap` where there is one."""
    z_Ct = jnp.matmul(x_CD, w_tD.T, preferred_element_type=jnp.promote_types(x_CD.dtype, jnp.float32))
    return cap * jnp.tanh(z_Ct / cap) if cap else z_Ct


def _forward(rows: int, tile: int, objective: Objective, x_nD: Array, w_VD: Array, y_n: Array) -> tuple[Array, Any]:
    size, wide = len(w_VD), jnp.promote_types(x_nD.dtype, jnp.float32)
    smoothing = objective.label_smoothing
    w_KtD = _pieces(w_VD, tile, 0)
    firsts_K = jnp.arange(len(w_KtD)) * w_KtD.shape[1]

    def of_chunk(chunk: tuple[Array, Array]) -> tuple[Array, ...]:
        x_CD, y_C = chunk

        def of_tile(so_far: Any, one: tuple[Array, Array]) -> tuple[Any, None]:
            top_C, total_C, picked_C, mean_C = so_far
            w_tD, first = one
            filled_t = first + jnp.arange(len(w_tD)) < size  # the columns that fill up the last tile count nowhere
            z_Ct = _logits(x_CD, w_tD, objective.soft_cap)
            if smoothing:
                mean_C = mean_C + jnp.where(filled_t, z_Ct, 0).sum(1) / size
            z_Ct = jnp.where(filled_t, z_Ct, -jnp.inf)
            at_C = jnp.clip(y_C - first, 0, len(w_tD) - 1)
            inside_C = (y_C >= first) & (y_C < first + len(w_tD))
            picked_C = jnp.where(inside_C, jnp.take_along_axis(z_Ct, at_C[:, None], 1)[:, 0], picked_C)
            higher_C = jnp.maximum(top_C, z_Ct.max(1))
            total_C = total_C * jnp.exp(top_C - higher_C) + jnp.exp(z_Ct - higher_C[:, None]).sum(1)
            return (higher_C, total_C, picked_C, mean_C), None

        zeros_C = jnp.zeros(len(x_CD), wide)
        start = (zeros_C - jnp.inf, zeros_C, zeros_C, zeros_C)
        return lax.scan(of_tile, start, (w_KtD, firsts_K))[0]

    statistics = lax.map(of_chunk, (_pieces(x_nD, rows, 0), _pieces(y_n, rows, IGNORED)))
    top_n, total_n, picked_n, mean_n = (of.reshape(-1)[: len(y_n)] for of in statistics)
    aimed_n = picked_n + smoothing * (mean_n - picked_n) if smoothing else picked_n
    lse_n = top_n + jnp.log(total_n)
    kept_n = y_n != IGNORED
    count = kept_n.sum().astype(wide)
    losses_n = lse_n - aimed_n
    if objective.z_loss:
        losses_n += objective.z_loss * jnp.square(lse_n)
    sure_n = jnp.exp(picked_n - top_n) > HALF * total_n if _apart(x_nD, w_VD, objective) else jnp.ones_like(kept_n)
    return jnp.where(kept_n, losses_n, 0).sum() / count, (x_nD, w_VD, y_n, top_n, total_n, count, sure_n)


def _backward(rows: int, tile: int, objective: Objective, residuals: Any, upstream: Array) -> tuple[Array, Array, None]:
    x_nD, w_VD, y_n, top_n, total_n, count, sure_n = residuals
    size, wide = len(w_VD), top_n.dtype
    smoothing, weight, cap = objective.label_smoothing, objective.z_loss, objective.soft_cap
    w_KtD = _pieces(w_VD, tile, 0)
    firsts_K = jnp.arange(len(w_KtD)) * w_KtD.shape[1]
    x_MCD, y_MC = _pieces(x_nD, rows, 0), _pieces(y_n, rows, IGNORED)
    top_MC, total_MC, sure_MC = _pieces(top_n, rows, 0), _pieces(total_n, rows, 1), _pieces(sure_n, rows, True)
    factor = (upstream / jnp.maximum(count, 1)).astype(wide)

    def of_tile(dx_MCD: Array, one: tuple[Array, Array]) -> tuple[Array, Array]:
        w_tD, first = one
        column_t = first + jnp.arange(len(w_tD))

        def of_chunk(dw_tD: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            x_CD, y_C, top_C, total_C, sure_C, dx_CD = chunk
            z_Ct = _logits(x_CD, w_tD, cap)
            # The gradients times `total`, up to the last factor: less is rounded than in exp(z - log-sum-exp).
            g_Ct = jnp.exp(jnp.where(column_t < size, z_Ct, -jnp.inf) - top_C[:, None])
            if weight:
                g_Ct *= 1 + 2 * weight * (top_C + jnp.log(total_C))[:, None]
            g_Ct -= ((1 - smoothing) * total_C * sure_C)[:, None] * (column_t == y_C[:, None])
            if smoothing:  # in the columns that fill up the last tile as well: they meet weights of 0
                g_Ct -= smoothing / size * total_C[:, None]
            if cap:
                g_Ct *= 1 - jnp.square(z_Ct / cap)
            g_Ct = (g_Ct * jnp.where(y_C != IGNORED, factor / total_C, 0)[:, None]).astype(x_CD.dtype)
            dx_CD = dx_CD + jnp.matmul(g_Ct, w_tD, preferred_element_type=wide)
            return dw_tD + jnp.matmul(g_Ct.T, x_CD, preferred_element_type=wide), dx_CD

        dw_tD, dx_MCD = lax.scan(
            of_chunk, jnp.zeros(w_tD.shape, wide), (x_MCD, y_MC, top_MC, total_MC, sure_MC, dx_MCD)
        )
        return dx_MCD, dw_tD.astype(w_VD.dtype)

    dx_MCD, dw_KtD = lax.scan(of_tile, jnp.zeros(x_MCD.shape, wide), (w_KtD, firsts_K))
    dw_VD = dw_KtD.reshape(-1, w_VD.shape[1])[:size]
    if _apart(x_nD, w_VD, objective):
        dw_VD, dx_MCD = _less_targets(dw_VD, dx_MCD, x_MCD, w_VD, y_MC, sure_MC, (1 - smoothing) * factor)
    return dx_MCD.reshape(-1, x_nD.shape[1])[: len(x_nD)].astype(x_nD.dtype), dw_VD, None


def _apart(x_nD: Array, w_VD: Array, objective: Objective) -> bool:
    """Return whether a target's 1 may be subtracted after the products: nothing between may round or bend it."""
    return x_nD.dtype == w_VD.dtype == jnp.promote_types(x_nD.dtype, jnp.float32) and not objective.soft_cap


def _less_targets(
    dw_VD: Array, dx_MCD: Array, x_MCD: Array, w_VD: Array, y_MC: Array, sure_MC: Array, factor: Array
) -> tuple[Array, Array]:
    """Subtract from both gradients, chunk by chunk, what the targets give whose 1 was not subtracted before."""

    def of_chunk(so_far: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        (dw_VD, dx_MCD), (number, x_CD, y_C, sure_C) = so_far, chunk
        at_C, rest_C1 = jnp.maximum(y_C, 0), jnp.where((y_C != IGNORED) & ~sure_C, factor, 0)[:, None]
        return (dw_VD.at[at_C].add(-rest_C1 * x_CD), dx_MCD.at[number].add(-rest_C1 * w_VD[at_C])), None

    return lax.scan(of_chunk, (dw_VD, dx_MCD), (jnp.arange(len(x_MCD)), x_MCD, y_MC, sure_MC))[0]


_cut_loss.defvjp(_forward, _backward)
