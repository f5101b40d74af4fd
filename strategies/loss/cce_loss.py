"""Compute the loss by Apple's Cut Cross-Entropy in Triton; keep no logits, multiply twice, skip small gradients.

`cut_cross_entropy.linear_cross_entropy` (Wijmans et al., 2024, arXiv:2411.09009): peak beyond inputs and gradients a
few numbers for each row and each token of the vocabulary. `impl` "cce" leaves out blocks of the gradient whose
probabilities are all below 1/32 of the resolution of the type, which makes it approximate; "cce_exact" leaves out
nothing, and "cce_kahan_full_c" filters that of the hidden states alone and sums with compensation. The release
on the package index knows "cce" alone; the other two come with the source at github.com/apple/ml-cross-entropy.
Its backward kernels take 16-bit types alone: give the row bfloat16 as well.
"""

from dataclasses import replace
from typing import Any

from harness import IGNORED, Objective, Parts, Strategy, hookimpl

IMPLEMENTATIONS = ("cce", "cce_exact", "cce_kahan_full_c")


def on_torch(parts: Parts, impl: str = "cce") -> Parts:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"cce_loss: impl is one of {', '.join(IMPLEMENTATIONS)}, not '{impl}'")
    objective = Objective.of(parts.shape)
    if objective.label_smoothing or objective.z_loss:
        raise ValueError(
            "cce_loss: its kernels have no label_smoothing and no z_loss: leave them at 0, or use cut_loss"
        )
    import torch
    from cut_cross_entropy import LinearCrossEntropyImpl, linear_cross_entropy

    if impl.upper() not in LinearCrossEntropyImpl.__members__:
        raise ValueError(
            f"cce_loss: the installed cut_cross_entropy has no impl '{impl}': "
            "install it from github.com/apple/ml-cross-entropy, or use impl 'cce'"
        )

    def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
        if not {x_BTD.dtype, w_VD.dtype} <= {torch.bfloat16, torch.float16}:
            raise ValueError(
                "cce_loss: its backward kernels take 16-bit types alone: write [cce_loss, bfloat16] in the suite"
            )
        return linear_cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            w_VD,
            y_BT.reshape(-1),
            ignore_index=IGNORED,
            softcap=objective.soft_cap or None,
            reduction="mean",
            shift=False,
            impl=impl,
        )

    return replace(parts, loss=loss)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "cce_loss",
            rewrites=("loss",),
            on={"torch": on_torch},
            about=__doc__,
            approximate=True,
            needs=("cut_cross_entropy",),
            excludes={"torch/cpu": "its kernels are written for GPUs"},
        )
    ]
