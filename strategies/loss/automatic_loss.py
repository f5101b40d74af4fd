"""Keep the plain loss while its logits are small, and do without them above a threshold; pay what the chosen one costs.

The logits are counted as n V elements of the type of the hidden states. At 10 GiB and 16 bit, with a vocabulary of
151,936, rows of 4,096 tokens (1.16 GiB) stay as they are, and those of 40,000 (11.3 GiB) and 131,072 (37.1 GiB) are
taken by `method`: `fused` as `fused_loss` does it, or `chunked` as `chunked_loss`. The choice and its reason are noted,
of batches that differ both with the largest logits of each, and as a number (`switched`, 1 or 0: whether any switched).
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs

GIB = 1 << 30
METHODS = ("fused", "chunked")


def is_large(rows: int, vocabulary: int, item_bytes: int, threshold_gib: float) -> bool:
    """Return whether the logits of so many rows are larger than the threshold."""
    return rows * vocabulary * item_bytes > threshold_gib * GIB


def share_of_logits(threshold_gib: float, shape: Any, small: Any) -> float:
    """Return the same share of the logits of a smaller shape."""
    return threshold_gib * _logits(small) / _logits(shape)


def _logits(shape: Any) -> int:
    rows = shape.batch * getattr(shape, "tokens", getattr(shape, "window", 1))
    return int(rows * getattr(shape, "vocabulary", getattr(shape, "classes", 1)))


def checked(method: str) -> None:
    """Raise ValueError for a method that is none."""
    if method not in METHODS:
        raise ValueError(f"automatic_loss: method is one of {', '.join(METHODS)}, not '{method}'")


def automatic(parts: Parts, lean: Parts, name: str, threshold_gib: float) -> Parts:
    plain, sizes = parts.loss, {False: 0.0, True: 0.0}  # of the largest logits that each loss was taken for

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        rows = 1
        for length in y_BT.shape:
            rows *= length
        large = is_large(rows, w_VD.shape[0], x_BTD.dtype.itemsize, threshold_gib)
        sizes[large] = max(sizes[large], rows * w_VD.shape[0] * x_BTD.dtype.itemsize / GIB)
        words = {True: (name, "above"), False: ("the plain loss", "at most")}
        parts.notes["choice"] = "; ".join(
            f"chose {taken}: logits of {sizes[each]:.2f} GiB are {against} {threshold_gib:g} GiB"
            for each, (taken, against) in words.items()
            if sizes[each]
        )
        parts.notes["switched"] = int(sizes[True] > 0)
        return (lean.loss if large else plain)(parts, x_BTD, w_VD, y_BT)

    return replace(parts, loss=loss)


def on_torch(parts: Parts, threshold_gib: float = 10.0, method: str = "fused") -> Parts:
    from strategies.loss import chunked_loss
    from strategies.loss.fused_loss import on_torch as fused

    knobs.at_least_0("automatic_loss", threshold_gib=threshold_gib)
    checked(method)
    lean = fused(parts) if method == "fused" else chunked_loss.on_torch(parts)
    return automatic(parts, lean, f"{method}_loss", threshold_gib)


def on_jax(parts: Parts, threshold_gib: float = 10.0, method: str = "fused") -> Parts:
    from strategies.loss import chunked_loss
    from strategies.loss.fused_loss import on_jax as fused

    knobs.at_least_0("automatic_loss", threshold_gib=threshold_gib)
    checked(method)
    lean = fused(parts) if method == "fused" else chunked_loss.on_jax(parts)
    return automatic(parts, lean, f"{method}_loss", threshold_gib)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "automatic_loss",
            rewrites=("loss",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            scaled={"threshold_gib": share_of_logits},  # the small row switches where the row itself does
        )
    ]
