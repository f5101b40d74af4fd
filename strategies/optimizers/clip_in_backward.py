"""Apply each gradient as soon as it is made, shrunk by the norm of all; pay a backward pass for that norm alone.

Two passes over the batch: in the first each gradient is reduced to its norm and dropped, in the second it is shrunk
where the norm of all exceeds `norm`, applied and dropped. Peak: that of `update_in_backward`, the largest gradient in
place of all of them. The steps are those of `clip_gradients` (LOMO: Lv et al., 2023, arXiv:2306.09782, section 3.3).
torch only: in JAX the loop over the layers would have to run twice, with the outer parameters between.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, tree
from strategies.optimizers import update_in_backward
from strategies.optimizers.clip_gradients import TINY, norm_of


def on_torch(parts: Parts, norm: float = 1.0) -> Parts:
    import torch

    knobs.above_0("clip_in_backward", norm=norm)
    once = update_in_backward.on_torch(parts).step

    def step(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        squares: list[Any] = []

        def measured(parts: Parts, state: Any, grads: Any) -> Any:
            squares.extend(torch.square(norm_of(g)) for _, g in tree.leaves(grads))
            return state

        inner = parts.update
        once(replace(parts, update=measured), state, x, y)
        share = (norm / (torch.stack(squares).sum().sqrt() + TINY)).clamp(max=1.0)

        def clipped(parts: Parts, state: Any, grads: Any) -> Any:
            return inner(parts, state, tree.mapped(lambda g: g * share, grads))

        return once(replace(parts, update=clipped), state, x, y)

    return replace(parts, step=step)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "clip_in_backward",
            rewrites=("step",),
            calls=("embed", "stack", "loss", "grad", "update"),
            on={"torch": on_torch},
            about=__doc__,
            approximate=True,
            probe={"norm": 0.1},
        )
    ]
