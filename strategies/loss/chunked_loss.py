"""Compute logits and loss chunk by chunk; with `recompute` keep none of them and project twice.

Peak: 3 C V elements with recomputation, and beside the gradient of the weight that of one chunk, V D elements, which is
added to it in the type of the weight; without recomputation every chunk's log-probabilities stay for the backward pass
(n V elements), which is how the method is often written and why it then saves little. Chunk sums are divided by the
count of all targets that carry loss, never averaged chunk by chunk. `chunk` is C, in tokens. Under torch's autocast
each chunk makes a copy of the weight in 16 bits, which stays for the backward pass where nothing is recomputed.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import IGNORED, Objective, Parts, Strategy, hookimpl, knobs


def on_torch(parts: Parts, chunk: int = 1024, recompute: bool = True) -> Parts:
    import torch
    from torch.utils.checkpoint import checkpoint

    knobs.above_0("chunked_loss", chunk=chunk)

    def total(objective: Objective, x_CD: Any, w_VD: Any, y_C: Any) -> Any:
        wide = torch.promote_types(x_CD.dtype, torch.float32)
        return objective.in_torch((x_CD @ w_VD.T).to(wide), y_C, reduction="sum")

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        of_chunk = partial(total, Objective.of(parts.shape))
        totals = [
            checkpoint(of_chunk, x_CD, w_VD, y_C, use_reentrant=False) if recompute else of_chunk(x_CD, w_VD, y_C)
            for x_CD, y_C in zip(x_ND.split(chunk), y_N.split(chunk), strict=True)
        ]
        return torch.stack(totals).sum() / (y_N != IGNORED).sum()

    return replace(parts, loss=loss)


def on_jax(parts: Parts, chunk: int = 1024, recompute: bool = True) -> Parts:
    import jax
    import jax.numpy as jnp

    knobs.above_0("chunked_loss", chunk=chunk)

    def total(objective: Objective, x_CD: Any, w_VD: Any, y_C: Any) -> Any:
        return objective.in_jax(x_CD @ w_VD.T, y_C).sum()

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        rows, size = len(y_N), min(chunk, len(y_N))
        padding = -rows % size
        x_MCD = jnp.pad(x_ND, ((0, padding), (0, 0))).reshape(-1, size, x_ND.shape[1])
        y_MC = jnp.pad(y_N, (0, padding), constant_values=IGNORED).reshape(-1, size)
        of_chunk = partial(total, Objective.of(parts.shape))
        one = jax.checkpoint(of_chunk, prevent_cse=False) if recompute else of_chunk
        summed, _ = jax.lax.scan(
            lambda so_far, xy: (so_far + one(xy[0], w_VD, xy[1]), None),
            jnp.zeros((), jnp.promote_types(x_ND.dtype, jnp.float32)),
            (x_MCD, y_MC),
        )
        return summed / (y_N != IGNORED).sum().astype(summed.dtype)

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "chunked_loss",
            rewrites=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"chunk": 23},
        )
    ]
