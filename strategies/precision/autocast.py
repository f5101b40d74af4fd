"""Multiply in 16 bits within the step, by the framework's own autocast; parameters and updates stay in float32.

Peak: about half of the activations that matrix products save, and 2 bytes for each parameter that has a 16-bit copy
while the step runs. The weights themselves do not become smaller. torch only: JAX has no such switch.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(dtype: str, parts: Parts) -> Parts:
    import torch

    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        with torch.autocast(parts.place.device, getattr(torch, dtype)):
            return inner(parts, state, x, y)

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    more = {
        "bfloat16": "Multiply in bfloat16 within the step; keep parameters and updates in float32.",
        "float16": "Multiply in float16 within the step without a loss scale; gradients below 6e-8 become zero.",
    }
    return [
        Strategy(
            f"{dtype}_autocast",
            rewrites=("grad",),
            on={"torch": partial(on_torch, dtype)},
            about=f"{line}\n\n{__doc__}",
            precision=dtype,
        )
        for dtype, line in more.items()
    ]
