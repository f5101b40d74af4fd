"""Keep the plain loss while its logits are small, and fuse it above a threshold; pay what the chosen one costs.

The logits are counted as n V elements of the type of the hidden states. At 10 GiB and 16 bit, with a vocabulary of
151,936, rows of 4,096 tokens (1.16 GiB) stay as they are, and those of 40,000 (11.3 GiB) and 131,072 (37.1 GiB) are
fused. The choice and its reason are noted.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl

GIB = 1 << 30


def chooses_fused(rows: int, vocabulary: int, item_bytes: int, threshold_gib: float) -> bool:
    """Return whether the logits of so many rows are larger than the threshold."""
    return rows * vocabulary * item_bytes > threshold_gib * GIB


def automatic(parts: Parts, fused: Parts, threshold_gib: float) -> Parts:
    plain = parts.loss

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        rows = 1
        for length in y_BT.shape:
            rows *= length
        large = chooses_fused(rows, w_VD.shape[0], x_BTD.dtype.itemsize, threshold_gib)
        size = rows * w_VD.shape[0] * x_BTD.dtype.itemsize / GIB
        name, against = ("fused_loss", "above") if large else ("the plain loss", "at most")
        parts.notes["choice"] = f"chose {name}: logits of {size:.2f} GiB are {against} {threshold_gib:g} GiB"
        return (fused.loss if large else plain)(parts, x_BTD, w_VD, y_BT)

    return replace(parts, loss=loss)


def on_torch(parts: Parts, threshold_gib: float = 10.0) -> Parts:
    from strategies.loss.fused_loss import on_torch

    return automatic(parts, on_torch(parts), threshold_gib)


def on_jax(parts: Parts, threshold_gib: float = 10.0) -> Parts:
    from strategies.loss.fused_loss import on_jax

    return automatic(parts, on_jax(parts), threshold_gib)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "automatic_loss",
            rewrites=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            probe={"threshold_gib": 0.0},  # small logits would never show what large ones get
        )
    ]
