"""AdamW by torch's own kernels, on all tensors at once or in one pass over each; the same update, other scratch.

The untouched update goes tensor by tensor, with the scratch of one. `foreach` makes scratch for all of them, one more
copy of the parameters; `fused` none. Loshchilov and Hutter, 2019, arXiv:1711.05101. torch only: in JAX the update is
compiled with the step.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl, tree


def on_torch(kernel: str, parts: Parts) -> Parts:
    import torch
    from torch.optim.adamw import adamw

    def begin(p: Any) -> list[Any]:
        """Make both moments of a tensor and its count of steps: `foreach` reads it, and would wait for a device."""
        first, second = (torch.zeros_like(p, requires_grad=False) for _ in range(2))
        counted_on = p.device if kernel == "fused" else "cpu"
        return [first, second, torch.zeros((), dtype=torch.float32, device=counted_on)]

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        if state["moments"] is None:
            state["moments"] = tree.mapped(begin, state["params"])
        moments: list[list[Any]] = []
        tree.mapped(lambda _, of: moments.append(of), state["params"], state["moments"])
        first, second, steps = (list(each) for each in zip(*moments, strict=True))
        params, grads_ = ([leaf for _, leaf in tree.leaves(each)] for each in (state["params"], grads))
        state["steps"] += 1
        with torch.no_grad():
            adamw(
                params,
                grads_,
                first,
                second,
                [],
                steps,
                foreach=kernel == "foreach",
                fused=kernel == "fused",
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=parts.shape.learning_rate,
                weight_decay=parts.shape.weight_decay,
                eps=1e-8,
                maximize=False,
            )
        return state

    return replace(parts, update=update)


OTHER_RULES = (
    *("adafactor", "adam_4bit", "adam_8bit", "adam_mini", "apollo", "galore", "lion", "lomo", "muon", "sgd_momentum"),
    "soap",
)
"""Rules of update beside AdamW, whose moments these kernels do not know."""


@hookimpl
def harness_strategies() -> list[Strategy]:
    first_lines = {
        "foreach": "Update all tensors in the same few calls (torch foreach AdamW); pay scratch for all of them.",
        "fused": "Update each tensor in one pass (torch fused AdamW); keep no scratch.",
    }
    return [
        Strategy(
            f"{kernel}_adamw",
            rewrites=("update",),
            on={"torch": partial(on_torch, kernel)},
            about=f"{line}\n\n{__doc__}",
            conflicts=dict.fromkeys(OTHER_RULES, "each updates by a rule of its own: leave out one of the two"),
        )
        for kernel, line in first_lines.items()
    ]
