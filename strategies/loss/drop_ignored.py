"""Gather the rows whose target counts before the loss; keep logits of these alone, pay a copy of their hidden states.

Peak: that of the loss inside, for the share of rows that count, and the hidden states of these once more. It goes with
any loss: the one it wraps sees fewer rows. torchtune's LinearCrossEntropyLoss does so. In torch the number of rows is
read back from the device; a prediction takes the share that the workload says is not ignored.

In JAX, where a program has fixed sizes, there is room for the share that the workload says is not ignored, for six
standard deviations and for eight rows more. A batch with more targets than that makes the loss NaN: none of them is
left out.
"""

from dataclasses import replace
from math import ceil
from typing import Any

from harness import IGNORED, Parts, Strategy, hookimpl

SPARE = 8
"""Rows for which JAX has room beside: deviations say little of a few targets."""


def expected(parts: Parts, rows: int, deviations: float = 0.0) -> int:
    """Return how many of so many rows count, by the share that the workload ignores at random."""
    share = getattr(parts.shape, "ignored", 0.0)
    return min(rows, ceil(rows * (1 - share) + deviations * (rows * share * (1 - share)) ** 0.5))


def on_torch(parts: Parts) -> Parts:
    from torch._subclasses import FakeTensor

    inner = parts.loss

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        if isinstance(y_N, FakeTensor):
            rows = y_N.new_zeros(expected(parts, len(y_N)))
        else:
            rows = (y_N != IGNORED).nonzero()[:, 0]
        if not len(rows):  # one row that is ignored: some losses take no row at all for an error
            rows = rows.new_zeros(1)
        return inner(parts, x_ND[rows][None], w_VD, y_N[rows][None])

    return replace(parts, loss=loss)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    inner = parts.loss

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        counts_N = y_N != IGNORED
        room = min(len(y_N), expected(parts, len(y_N), deviations=6.0) + SPARE)
        rows = jnp.nonzero(counts_N, size=room, fill_value=len(y_N))[0]
        x_CD = x_ND.at[rows].get(mode="fill", fill_value=0)
        y_C = y_N.at[rows].get(mode="fill", fill_value=IGNORED)
        value = inner(parts, x_CD[None], w_VD, y_C[None])
        return jnp.where(counts_N.sum() <= room, value, jnp.nan)

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "drop_ignored",
            rewrites=("loss",),
            calls=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
        )
    ]
