"""The row kernel for JAX on a GPU, in Pallas, as `_kernel` for torch: logits in, their gradient out in their place.

One program takes one row, in blocks of `BLOCK` logits: the first pass finds the largest and the sum of exponentials,
the second writes the gradients. All is computed in float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from harness import Objective
from strategies.loss.fused_loss import HALF

DEVICE = "cuda"
Array = jax.Array
BLOCK, WARPS = 4096, 8
LEAST = -3.0e38
"""Below every logit, and finite: the difference of two is no NaN."""


def differentiated(
    z_CV: Array, y_C: Array, ignore_index: int, objective: Objective, apart: bool, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Return the losses of logits, 0 where ignored, their gradients, and what is still to be subtracted at each target.

    The gradients take the place of the logits. The last is nothing, unless it may be done `apart`. With `interpret`
    it runs anywhere, slowly.
    """
    rows, V = z_CV.shape
    row, of_row = pl.BlockSpec((None, V), lambda at: (at, 0)), pl.BlockSpec((None,), lambda at: (at,))
    scalars = jax.ShapeDtypeStruct((rows,), jnp.float32)
    block = min(BLOCK, pl.next_power_of_2(V))
    g_CV, losses_C, rest_C = pl.pallas_call(
        partial(_differentiate_row, V, block, ignore_index, objective, apart),
        out_shape=(jax.ShapeDtypeStruct(z_CV.shape, z_CV.dtype), scalars, scalars),
        grid=(rows,),
        in_specs=(row, of_row),
        out_specs=(row, of_row, of_row),
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="differentiate_rows",
    )(z_CV, y_C.astype(jnp.int32))
    return losses_C, g_CV, rest_C


def _differentiate_row(
    V: int, block: int, ignored: int, objective: Objective, apart: bool,
    z_ref: Any, y_ref: Any, g_ref: Any, loss_ref: Any, rest_ref: Any,
) -> None:  # fmt: skip
    """Turn one row of logits [V] into the gradient of its loss; write its loss and its rest."""
    smoothing, weight, cap = objective.label_smoothing, objective.z_loss, objective.soft_cap
    lanes, blocks, y = jnp.arange(block), pl.cdiv(V, block), y_ref[...]

    def capped(a: Array) -> Array:
        return cap * jnp.tanh(a / cap) if cap else a

    def logits(at: Any) -> tuple[Array, Array, Array]:
        columns = at * block + lanes
        inside = columns < V
        a = triton.load(z_ref.at[pl.ds(at * block, block)], mask=inside, other=0.0)
        return columns, inside, capped(a.astype(jnp.float32))

    def write(at: Any, g: Array, inside: Array) -> None:
        triton.store(g_ref.at[pl.ds(at * block, block)], g.astype(g_ref.dtype), mask=inside)

    @pl.when(y == ignored)
    def _() -> None:
        zeros = jnp.zeros((block,), jnp.float32)
        lax.fori_loop(0, blocks, lambda at, none: write(at, zeros, at * block + lanes < V), None)
        loss_ref[...], rest_ref[...] = jnp.float32(0), jnp.float32(0)

    @pl.when(y != ignored)
    def _() -> None:
        def seen(at: Any, lane: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            tops, totals, sums = lane
            _, inside, a = logits(at)
            higher = jnp.maximum(tops, jnp.where(inside, a, LEAST))
            totals = totals * jnp.exp(tops - higher) + jnp.where(inside, jnp.exp(a - higher), 0.0)
            return higher, totals, sums + jnp.where(inside, a, 0.0)

        nothing = jnp.zeros((block,), jnp.float32)
        tops, totals, sums = lax.fori_loop(0, blocks, seen, (nothing + LEAST, nothing, nothing))
        top = tops.max()
        total = (totals * jnp.exp(tops - top)).sum()
        picked = capped(z_ref[y].astype(jnp.float32))
        log_total = jnp.log(total)
        lse, aimed = top + log_total, 1 - smoothing
        loss = (top - picked) + log_total + smoothing * (picked - sums.sum() / V) + weight * lse * lse
        unsure = jnp.exp(picked - top) <= HALF * total
        rest = jnp.where(unsure, jnp.float32(aimed), jnp.float32(0)) if apart else jnp.float32(0)
        loss_ref[...], rest_ref[...] = loss, rest
        scale = (1 + 2 * weight * lse) / total

        def differentiate(at: Any, none: None) -> None:
            columns, inside, a = logits(at)
            g = jnp.exp(a - top) * scale
            if smoothing:
                g -= smoothing / V
            g = jnp.where(columns == y, g - (aimed - rest), g)
            write(at, g * (1 - jnp.square(a / cap)) if cap else g, inside)

        lax.fori_loop(0, blocks, differentiate, None)
