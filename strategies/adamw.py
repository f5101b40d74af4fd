"""AdamW by torch's own kernels, on all tensors at once or in one pass over each; the same update, other scratch.

The untouched update goes tensor by tensor, with the scratch of one. `foreach` makes scratch for all of them, one more
copy of the parameters; `fused` none. Loshchilov and Hutter, 2019, arXiv:1711.05101. torch only: in JAX the update is
compiled with the step.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the tensors of nested dicts and lists in order."""
    if isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(each)
    else:
        yield tree


def on_torch(kernel: str, parts: Parts) -> Parts:
    import torch
    from torch.optim.adamw import adamw

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        params, grads_ = list(leaves(state["params"])), list(leaves(grads))
        if state["moments"] is None:
            first, second = ([torch.zeros_like(p, requires_grad=False) for p in params] for _ in range(2))
            steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]
            state["moments"] = [first, second, steps]
        state["steps"] += 1
        first, second, steps = state["moments"]
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
        )
        for kernel, line in first_lines.items()
    ]
