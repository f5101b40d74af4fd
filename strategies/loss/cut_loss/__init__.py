"""Compute the loss from running sums over tiles of the vocabulary; keep no row of logits, multiply each tile twice.

The algorithm is that of Cut Cross-Entropy (Wijmans et al., 2024, arXiv:2411.09009) without its filter of small
gradients, so it is exact but for the order of its sums: the log-sum-exp of a row is found online, tile by tile, as in
online softmax (Milakov and Gimelshein, 2018), and the backward pass makes each tile again from it.

Peak beyond inputs and gradients: one tile of `rows` x `tile` logits in torch and two in JAX, one more with a soft cap,
and three numbers for each row; in 16 bit the float32 tile has a 16-bit one beside it, and the gradient of the hidden
states is in float32 until the end. Targets of -100 carry no loss. Sums are in float32 (float64 for float64 inputs).
"""

from dataclasses import replace
from typing import Any

from harness import Objective, Parts, Strategy, hookimpl, knobs


def on_torch(parts: Parts, rows: int = 1024, tile: int = 4096) -> Parts:
    from strategies.loss.cut_loss._torch import cut_loss

    knobs.above_0("cut_loss", rows=rows, tile=tile)

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        return cut_loss(x_BTD, w_VD, y_BT, rows, tile, Objective.of(parts.shape))

    return replace(parts, loss=loss)


def on_jax(parts: Parts, rows: int = 1024, tile: int = 4096) -> Parts:
    from strategies.loss.cut_loss._jax import cut_loss

    knobs.above_0("cut_loss", rows=rows, tile=tile)

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        return cut_loss(x_BTD, w_VD, y_BT, rows, tile, Objective.of(parts.shape))

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "cut_loss",
            rewrites=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"rows": 23, "tile": 16},
        )
    ]
