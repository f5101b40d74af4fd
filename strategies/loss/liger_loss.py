"""Compute the gradients with the loss by Liger Kernel in Triton; keep a chunk of logits and both gradients.

`LigerFusedLinearCrossEntropyLoss` (Hsu et al., 2024, arXiv:2410.10989; liger-kernel 0.8): peak beyond inputs C V
elements of logits, the n D of one gradient and V D of the other in float32, and once more in the type of the weight.
Its C is the power of two at or above n / ceil(V / D) rows. Left to itself it would sum the weight gradient in the type
of the weight: here float32 is asked for. Without a target that counts its loss is 0, where others give NaN. It reads
the number of targets back to the host.
"""

from dataclasses import replace
from typing import Any

from harness import IGNORED, Objective, Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    import torch
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        objective = Objective.of(parts.shape)
        fused = LigerFusedLinearCrossEntropyLoss(
            ignore_index=IGNORED,
            lse_square_scale=objective.z_loss,
            label_smoothing=objective.label_smoothing,
            reduction="mean",
            softcap=objective.soft_cap or None,
            accum_dtype=torch.float32,
        )
        return fused(w_VD, x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1))

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "liger_loss",
            rewrites=("loss",),
            on={"torch": on_torch},
            about=__doc__,
            needs=("liger_kernel",),
            conflicts=dict.fromkeys(
                ("float16_scaled", "float16_master"),
                "Liger divides by the number of targets in float16, before the loss is scaled: use fused_loss",
            ),
            excludes={"torch/cpu": "its kernels are written for GPUs"},
        )
    ]
