"""Compute the gradients with the loss, chunk by chunk; keep no logits, but the weight gradient from then on.

The algorithm is that of Liger Kernel's fused linear cross-entropy (Hsu et al., 2024, arXiv:2410.10989): the
gradient of a mean is known up to one factor as soon as the loss is, so a chunk's logits are turned into its
share of both gradients at once and their buffer is used again. Nothing is computed twice. The price is that
the gradients of the hidden states and of the classifier live from the end of the forward pass, and that
neither the second derivative nor a second backward pass through the same loss exists.

Unlike its model, the weight gradient is summed in float32 whatever the inputs are (on a GPU in bfloat16 for weights of
bfloat16, where there are no more than eight chunks), and both gradients are held *unscaled*: the factor (upstream
gradient / number of targets that count) is applied in float32 in the backward pass, so a loss scale keeps float16
gradients from underflowing. In float16 a chunk overflows, whatever the scale, whose rows of one target add up to more
than 65,504 on a CPU. A soft cap needs the slopes of a quarter of a chunk besides.

Knobs, the same in both frameworks:
    chunk         rows of logits alive at once; 0 chooses: their bytes are a quarter of the bytes of the two
                  gradients as held, rounded down to a multiple of 64 rows, never below 64 nor above 4096; where the
                  kernel of rows runs (GPUs), 2048.
    ignore_index  targets of this value add nothing to the loss, to its gradients or to the divisor; a
                  suite can give -100 alone, which its data have.
"""

from dataclasses import replace
from typing import Any

from harness import Objective, Strategy, hookimpl

HALF = 0.5
"""The probability of a target from which on its difference to 1 is formed first."""
TILE = 4096
"""Rows of the weight, or of the hidden states, in one sum or product; in 16 bit that has 6 D TILE bytes of scratch."""


def on_torch(parts: Any, chunk: int = 0, ignore_index: int = -100) -> Any:
    """Replace the loss by one `torch.autograd.Function`."""
    if ignore_index != -100:
        raise ValueError(f"fused_loss: ignored targets are -100 here, not {ignore_index}: leave ignore_index out")
    from strategies.loss.fused_loss._torch import fused_loss

    def loss(parts: Any, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        return fused_loss(x_BTD, w_VD, y_BT, chunk, ignore_index, Objective.of(parts.shape))

    return replace(parts, loss=loss)


def on_jax(parts: Any, chunk: int = 0, ignore_index: int = -100) -> Any:
    """Replace the loss by one `jax.custom_vjp`."""
    if ignore_index != -100:
        raise ValueError(f"fused_loss: ignored targets are -100 here, not {ignore_index}: leave ignore_index out")
    from strategies.loss.fused_loss._jax import fused_loss

    kernel: Any = None
    if parts.place.device == "cuda":
        from strategies.loss.fused_loss import _pallas

        kernel = _pallas.differentiated

    def loss(parts: Any, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        return fused_loss(x_BTD, w_VD, y_BT, chunk, ignore_index, Objective.of(parts.shape), kernel)

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    """Register the strategy under its name."""
    return [Strategy("fused_loss", rewrites=("loss",), on={"torch": on_torch, "jax": on_jax}, about=__doc__)]
