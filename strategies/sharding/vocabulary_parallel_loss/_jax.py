"""The losses of all tokens from rows of the classifier that are spread over devices."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from harness import IGNORED, Objective, Parts
from strategies.sharding._jax import (
    AXIS,
    Size,
    all_gather,
    divided,
    dividing,
    filled,
    for_all,
    gathered,
    known,
    lies_divided,
    over_ranks,
    own_piece,
    own_rank,
    summed_part,
)
from strategies.sharding.shares import WHOLE


def vocabulary_parallel_loss(parts: Parts, chunk: int = 1024) -> Parts:
    """Hold some rows of the classifier; make logits for these alone, and the sum over all rows of what they give."""
    inner_draw, inner_embed = parts.draw, parts.embed
    tied = getattr(parts.shape, "tied", False)
    classifier = "embed" if tied else "head"

    def same_tokens(parts: Parts) -> bool:
        return parts.ranks == 1 or parts.division.granularity == WHOLE

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        return divided(parts, name, value) if name == classifier and not lies_divided(value) else value

    def embed(parts: Parts, params: Any, x_BT: Any) -> Any:
        """Look up the tokens of all ranks among the own rows, and sum what the ranks have."""
        w_UD = params["embed"]
        if not tied or parts.ranks == 1:
            return inner_embed(parts, params, x_BT)
        same = same_tokens(parts)
        at = (x_BT if same else all_gather(parts, x_BT)) - own_rank(parts) * len(w_UD)
        inside = (at >= 0) & (at < len(w_UD))
        rows_BTD = jnp.where(inside[..., None], w_UD[jnp.where(inside, at, 0)], 0)
        x_BTD = over_ranks(parts, rows_BTD) if same else summed_part(parts, rows_BTD)
        return parts.add_positions(parts, params, x_BTD)

    def loss(parts: Parts, x_BTD: Any, w_UD: Any, y_BT: Any) -> Any:
        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        size = min(chunk, len(y_N))
        count = -(-len(y_N) // size)
        x_MCD = filled(x_ND, count * size, 0).reshape(count, size, -1)
        y_MC = filled(y_N, count * size, 0, IGNORED).reshape(count, size)

        @partial(jax.checkpoint, prevent_cse=False)
        def of_chunk(w_UD: Any, x_CD: Any, y_C: Any) -> Any:
            """Sum the losses of this rank's tokens; where ranks have others, each makes logits for those of all."""
            if same_tokens(parts):
                losses_C = losses(parts, x_CD, w_UD, y_C)
            else:
                of_all = losses(parts, all_gather(parts, x_CD), w_UD, all_gather(parts, y_C))
                losses_C = own_piece(parts, of_all)
            return jnp.where(y_C != IGNORED, losses_C, 0).sum()

        start = jnp.zeros((), jnp.promote_types(x_ND.dtype, jnp.float32))
        total, _ = lax.scan(lambda sum_, xy: (sum_ + of_chunk(w_UD, *xy), None), start, (x_MCD, y_MC))
        return known(total) / (y_N != IGNORED).sum().astype(total.dtype)

    division = replace(parts.division, over_vocabulary=frozenset({"loss", "embed"} if tied else {"loss"}))
    gather_parameters = gathered(parts.gather_parameters)
    parts = replace(parts, draw=draw, embed=embed, loss=loss, gather_parameters=gather_parameters, division=division)
    return dividing(parts, for_all, WHOLE)


def losses(parts: Parts, x_CD: Any, w_UD: Any, y_C: Any) -> Any:
    """Compute the losses [C] of tokens that all ranks have, of which each makes the logits of U rows."""
    objective, vocabulary = Objective.of(parts.shape), parts.shape.vocabulary
    logits_CU = x_CD @ w_UD.T
    logits_CU = logits_CU.astype(jnp.promote_types(logits_CU.dtype, jnp.float32))
    if cap := objective.soft_cap:
        logits_CU = cap * jnp.tanh(logits_CU / cap)
    first = own_rank(parts) * len(w_UD)
    there_U = first + jnp.arange(len(w_UD)) < vocabulary
    shown_CU = jnp.where(there_U, logits_CU, -jnp.inf)
    top_C = lax.stop_gradient(shown_CU).max(1)
    top_C = lax.pmax(top_C, AXIS) if parts.ranks > 1 else top_C
    lse_C = top_C + jnp.log(over_ranks(parts, jnp.exp(shown_CU - top_C[:, None]).sum(1)))
    at_C = y_C - first
    inside_C = (at_C >= 0) & (at_C < len(w_UD))
    picked_C = jnp.take_along_axis(logits_CU, jnp.where(inside_C, at_C, 0)[:, None], 1)[:, 0]
    picked_C = over_ranks(parts, jnp.where(inside_C, picked_C, 0))
    losses_C = lse_C - picked_C
    if objective.label_smoothing:
        mean_C = over_ranks(parts, jnp.where(there_U, logits_CU, 0).sum(1)) / vocabulary
        losses_C += objective.label_smoothing * (picked_C - mean_C)
    if objective.z_loss:
        losses_C += objective.z_loss * jnp.square(lse_C)
    return losses_C
