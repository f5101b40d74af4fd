"""The fused loss as one `jax.custom_vjp` over a `lax.scan`.

The scan carries the loss and the float32 weight gradient and emits the hidden states' gradient, chunk after
chunk. In a Python loop XLA would be free to keep every chunk's logits alive. Rows that do not fill the last
chunk are padded with ignored targets. On a GPU the rows of a chunk go through a kernel, see `_pallas`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from harness import IGNORED, Objective
from strategies.loss.fused_loss import HALF

Array = jax.Array
PLAIN = Objective()
ROWS = 2048
"""Rows of a chunk where a kernel differentiates them: each chunk reads and writes the weight's gradient."""
TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
"""Types of logits that a kernel takes."""
Kernel = Callable[[Array, Array, int, Objective, bool], tuple[Array, Array, Array]]


def chunk_rows(V: int, gradient_bytes: int) -> int:
    """Choose the rows of float32 logits alive at once: a quarter of the gradients' bytes, 64 to 4096."""
    rows = gradient_bytes // 4 // (V * 4) // 64 * 64
    return max(64, min(rows, 4096))


def fused_loss(
    x_BTD: Array,
    w_VD: Array,
    y_BT: Array,
    chunk: int = 0,
    ignore_index: int = IGNORED,
    objective: Objective = PLAIN,
    kernel: Kernel | None = None,
) -> Array:
    """Return the mean loss of the logits `x @ w.T` against `y`, in float32 (float64 for float64 inputs).

    `x_BTD` is [..., D], `w_VD` [V, D], `y_BT` [...] of any integer type; the other arguments are
    static. The mean is over targets other than `ignore_index`, NaN if there are none. `chunk` rows of logits
    are alive at once, 0 chooses. `kernel` differentiates rows of logits in their place, as `_pallas.differentiated`
    does; None leaves that to XLA. Raises ValueError for shapes that do not agree or a negative chunk, and
    TypeError when differentiated forward.
    """
    if w_VD.ndim != 2 or x_BTD.shape[-1] != w_VD.shape[1] or x_BTD.shape[:-1] != y_BT.shape:
        raise ValueError(
            f"fused_loss needs x [..., D], w [V, D] and y [...], got {x_BTD.shape}, {w_VD.shape} and "
            f"{y_BT.shape}: pass hidden states and targets of equal leading shape."
        )
    if chunk < 0:
        raise ValueError(f"fused_loss: chunk is {chunk}, but must be a number of rows, or 0 to choose.")
    return _fused_loss(chunk, ignore_index, objective, kernel, x_BTD, w_VD, y_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _fused_loss(
    chunk: int, ignored: int, objective: Objective, kernel: Kernel | None, x_BTD: Array, w_VD: Array, y_BT: Array
) -> Array:
    return _loss_and_gradients(chunk, ignored, objective, None, x_BTD, w_VD, y_BT, gradients=False)[0]


def _forward(
    chunk: int, ignored: int, objective: Objective, kernel: Kernel | None, x_BTD: Array, w_VD: Array, y_BT: Array
) -> tuple[Array, Any]:
    loss, count, dx_BTD, dw_VD = _loss_and_gradients(
        chunk, ignored, objective, kernel, x_BTD, w_VD, y_BT, gradients=True
    )
    like_w = jnp.empty((0,), w_VD.dtype)  # a residual must be an array: this one brings the type alone
    return loss, (count, dx_BTD, dw_VD, like_w)


def _backward(
    chunk: int, ignored: int, objective: Objective, kernel: Kernel | None, residuals: Any, upstream: Array
) -> tuple[Array, Array, None]:
    count, dx_BTD, dw_VD, like_w = residuals
    factor = upstream / jnp.maximum(count, 1)  # without a target that counts, all gradients are 0
    return (dx_BTD * factor).astype(dx_BTD.dtype), (dw_VD * factor).astype(like_w.dtype), None


_fused_loss.defvjp(_forward, _backward)


def _loss_and_gradients(
    chunk: int,
    ignored: int,
    objective: Objective,
    kernel: Kernel | None,
    x_BTD: Array,
    w_VD: Array,
    y_BT: Array,
    gradients: bool,
) -> tuple[Array, Array, Any, Any]:
    """Return the loss, the number of rows in it, and the gradients of the *sum* (None when not wanted)."""
    (V, D), n = w_VD.shape, y_BT.size
    dtype = jnp.promote_types(x_BTD.dtype, w_VD.dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    kernel = kernel if dtype in TYPES else None
    if not chunk and kernel is not None:
        chunk = ROWS
    elif not chunk:
        chunk = chunk_rows(V, n * D * x_BTD.dtype.itemsize + V * D * wide.itemsize)
    chunks = max(1, -(-n // chunk))
    chunk = -(-n // chunks)  # even chunks: fewer than `chunks` rows of padding
    padding = chunks * chunk - n
    x_nD, y_n = x_BTD.reshape(-1, D), y_BT.reshape(-1)
    if padding:
        x_nD = jnp.pad(x_nD, ((0, padding), (0, 0)))
        y_n = jnp.pad(y_n, (0, padding), constant_values=ignored)
    matmul = partial(jnp.matmul, preferred_element_type=wide)
    w = w_VD.astype(dtype)
    apart = x_BTD.dtype == w_VD.dtype == wide and not objective.soft_cap

    def body(carry: tuple[Array, Any], rows: tuple[Array, Array]) -> tuple[tuple[Array, Any], Any]:
        loss, dw_VD = carry
        x_CD, y_C = rows[0].astype(dtype), rows[1]
        counts_C = y_C != ignored
        target_C = jnp.where(counts_C, y_C, 0)
        if kernel is not None:
            losses_C, g_CV, rest_C = kernel(jnp.matmul(x_CD, w.T), y_C, ignored, objective, apart)
        else:
            losses_C, g_CV, rest_C = _differentiated(matmul(x_CD, w.T), target_C, counts_C, objective, apart)
        loss = loss + losses_C.sum()
        if not gradients:
            return (loss, None), None
        g_CV = g_CV.astype(dtype)
        dw_VD, dx_CD = dw_VD + matmul(g_CV.T, x_CD), matmul(g_CV, w)
        if apart:
            dw_VD = dw_VD.at[target_C].add(-rest_C[:, None] * x_CD)
            dx_CD -= rest_C[:, None] * w[target_C]
        return (loss, dw_VD), dx_CD.astype(x_BTD.dtype)

    start = (jnp.zeros((), wide), jnp.zeros((V, D), wide) if gradients else None)
    rows = (x_nD.reshape(chunks, chunk, D), y_n.reshape(chunks, chunk))
    (loss, dw_VD), dx = lax.scan(body, start, rows)
    count = (y_n != ignored).sum().astype(wide)
    if gradients:
        dx = dx.reshape(-1, D)[:n].reshape(x_BTD.shape)
    return loss / count, count, dx, dw_VD


def _differentiated(
    z_CV: Array, target_C: Array, counts_C: Array, objective: Objective, apart: bool
) -> tuple[Array, Array, Array]:
    """Return the losses of logits, 0 where ignored, their gradients, and what is still to be subtracted at each target.

    The last is nothing, unless it may be done `apart`. What is not used is not computed: all of it is compiled.
    """
    smoothing, weight, cap = objective.label_smoothing, objective.z_loss, objective.soft_cap
    if cap:
        z_CV = cap * jnp.tanh(z_CV / cap)
    top_C = z_CV.max(1)
    exp_CV = jnp.exp(z_CV - top_C[:, None])
    total_C = exp_CV.sum(1)
    lse_C = top_C + jnp.log(total_C)
    picked_C = jnp.take_along_axis(z_CV, target_C[:, None], axis=1)[:, 0]
    losses_C = top_C - picked_C + jnp.log(total_C)
    if smoothing:
        losses_C += smoothing * (picked_C - z_CV.mean(1))
    if weight:
        losses_C += weight * jnp.square(lse_C)
    g_CV = exp_CV / total_C[:, None]  # exp(z - lse) would round the log-sum-exp first
    if weight:
        g_CV *= 1 + 2 * weight * lse_C[:, None]
    unsure_C = jnp.exp(picked_C - top_C) <= HALF * total_C
    rest_C = jnp.where(apart & counts_C & unsure_C, 1 - smoothing, 0).astype(z_CV.dtype)
    # Compared with an iota, not scattered: XLA fuses it all into one pass over the logits.
    hit_CV = lax.broadcasted_iota(target_C.dtype, z_CV.shape, 1) == target_C[:, None]
    g_CV -= (1 - smoothing - rest_C)[:, None] * hit_CV
    if smoothing:
        g_CV -= smoothing / z_CV.shape[1]
    if cap:
        g_CV *= 1 - jnp.square(z_CV / cap)
    return jnp.where(counts_C, losses_C, 0), jnp.where(counts_C[:, None], g_CV, 0), rest_C
