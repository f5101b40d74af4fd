"""Compute the loss line by line as a report on a model of 4B parameters printed it, whole or in its chunks of tokens.

Whole: all logits in the type of the hidden states, shifted by one and made contiguous, then torch's cross-entropy in
that type. Peak: 2 n V elements after it and 3 n V in its backward pass, the log-probabilities and two gradients. With
`chunk` (0: none) logits and loss are taken so many tokens at a time and added up; every chunk's log-probabilities stay
for the backward pass, n V elements. No sum is widened: in bfloat16 it is added up with 8 bits. The shift leaves out the
last token of each row, which has a target here, so the loss is that of other tokens than the baseline's. Under torch's
autocast each chunk keeps a 16-bit copy of the classifier of its own. Pieces of a batch, of `accumulate` and on ranks,
are weighed by all their targets: a part of 1 / T of the gradient is off, and a piece whose only targets are last ones
has no number.
"""

from dataclasses import replace
from typing import Any

from harness import IGNORED, Objective, Parts, Strategy, hookimpl


def checked(parts: Parts, chunk: int) -> None:
    """Refuse what the printed code has not; raise ValueError."""
    if chunk < 0:
        raise ValueError(f"document_loss: chunk is {chunk}: give a number of tokens, or 0 for all at once")
    if Objective.of(parts.shape) != Objective():
        raise ValueError("document_loss: it has no z_loss, soft_cap or label_smoothing: leave them at 0")
    if getattr(parts.shape, "tokens", getattr(parts.shape, "window", 2)) < 2:
        raise ValueError("document_loss: it leaves out the last token of each row: take two tokens or more")


def on_torch(parts: Parts, chunk: int = 0) -> Parts:
    import torch.nn.functional as F

    checked(parts, chunk)

    def whole(x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        logits = x_BTD @ w_VD.T
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = y_BT[..., :-1].contiguous()
        return F.cross_entropy(
            shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), ignore_index=IGNORED
        )

    def chunked(x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        x_ND, y_N = x_BTD[..., :-1, :].flatten(0, 1), y_BT[..., :-1].flatten()
        total: Any = 0.0
        for x_CD, y_C in zip(x_ND.split(chunk), y_N.split(chunk), strict=True):
            total = total + F.cross_entropy(x_CD @ w_VD.T, y_C, ignore_index=IGNORED, reduction="sum")
        return total / (y_N != IGNORED).sum()

    return replace(parts, loss=lambda parts, x, w, y: (chunked if chunk else whole)(x, w, y))


def on_jax(parts: Parts, chunk: int = 0) -> Parts:
    import jax
    import jax.numpy as jnp

    checked(parts, chunk)

    def summed(x_CD: Any, w_VD: Any, y_C: Any) -> Any:
        logs_CV = jax.nn.log_softmax(x_CD @ w_VD.T)
        picked_C = jnp.take_along_axis(logs_CV, jnp.maximum(y_C, 0)[:, None], 1)[:, 0]
        return -jnp.where(y_C == IGNORED, 0, picked_C).sum()

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        if y_BT.shape[1] < 2:
            raise ValueError(
                "document_loss leaves out the last token of each row, and these have no other: take two tokens or more"
            )
        x_ND, y_N = x_BTD[:, :-1].reshape(-1, x_BTD.shape[-1]), y_BT[:, :-1].reshape(-1)
        size = chunk or len(y_N)
        totals = [summed(x_ND[at : at + size], w_VD, y_N[at : at + size]) for at in range(0, len(y_N), size)]
        total = jnp.stack(totals).sum()
        return total / (y_N != IGNORED).sum().astype(total.dtype)

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "document_loss",
            rewrites=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            scaled={"chunk": lambda chunk, shape, small: 23 if chunk else 0},
            conflicts={
                **dict.fromkeys(
                    ("ring_attention", "ulysses", "megatron_sequence_parallel"),
                    "each rank has a stretch of every row, and would leave out the last token of that",
                ),
                "chunked_backward_loss": "it would leave out the last token of each chunk",
                "drop_ignored": "of all rows in one it would leave out the last token alone",
                "truncated_bptt": "it would leave out the last frame of each segment, whose target the weights count",
            },
        )
    ]
