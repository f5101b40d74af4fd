"""Compute the loss by torch's own chunked linear cross-entropy; keep a chunk of logits and both gradients.

`torch.nn.functional.linear_cross_entropy` (torch 2.13): peak (n + V) D elements of gradients and `chunk` V of logits;
in 16 bit on a CPU a float32 copy of the weight besides. `policy` is its accumulation policy, `accurate`, `balanced` or
`compact`; `chunk` 0 leaves the choice to it. Sums within a chunk are in float32: naming a policy alone would leave them
in the type of the inputs. In that type torch adds up what chunks give: the gradient of the weight, and in bfloat16 the
loss, which many chunks put a few percent off. What it would do by the full logits, with a warning, is an error here.
Of a batch without a target that counts its gradients are no numbers.
"""

import warnings
from dataclasses import replace
from typing import Any

from harness import IGNORED, Objective, Parts, Strategy, hookimpl, knobs

POLICIES = ("auto", "accurate", "balanced", "compact")


def on_torch(parts: Parts, policy: str = "auto", chunk: int = 0) -> Parts:
    import torch
    import torch.nn.functional as F

    knobs.at_least_0("native_loss", chunk=chunk)
    if policy not in POLICIES:
        raise ValueError(f"native_loss: policy is one of {', '.join(POLICIES)}, not '{policy}'")
    if Objective.of(parts.shape) != Objective():
        raise ValueError(
            "native_loss: torch has no z_loss and no soft_cap for it, and keeps all logits with label_smoothing: "
            "leave them at 0, or use fused_loss"
        )

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        half = x_BTD.dtype in (torch.float16, torch.bfloat16)
        options = torch.nn.LinearCrossEntropyOptions(
            acc_policy=policy,  # type: ignore[arg-type]
            acc_dtype=torch.float32 if half else None,
            batch_chunk_size=chunk or None,
            chunking_method=None if chunk else "auto",
        )
        x_ND, y_N = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*linear_cross_entropy.*")
            return F.linear_cross_entropy(x_ND, w_VD, y_N, ignore_index=IGNORED, options=options)

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "native_loss",
            rewrites=("loss",),
            on={"torch": on_torch},
            about=__doc__,
            needs=("torch>=2.13",),
            probe={"chunk": 23},
        ),
    ]
