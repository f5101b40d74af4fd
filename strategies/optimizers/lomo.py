"""Apply each gradient as soon as it is made and keep no moment at all; pay Adam's pace.

Peak: parameters, activations and the largest gradient. This is LOMO (Lv et al., 2023, arXiv:2306.09782): gradient
descent within the backward pass, where a gradient is dropped as soon as it was added. Without moments the learning rate
is another than Adam's: that of the suite is multiplied by `factor`.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, update_rules
from strategies.optimizers import update_in_backward


def on_torch(parts: Parts, factor: float = 10.0) -> Parts:
    knobs.above_0("lomo", factor=factor)

    def begin(name: str, p: Any) -> list[Any]:
        return []

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        p.mul_(turn.shrink()).add_(g, alpha=-turn.rate * factor)

    return update_in_backward.on_torch(update_rules.in_torch(parts, begin, move))


def on_jax(parts: Parts, factor: float = 10.0) -> Parts:
    knobs.above_0("lomo", factor=factor)

    def begin(name: str, p: Any) -> Any:
        return {}

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: Any) -> tuple[Any, Any]:
        return (p * turn.shrink() - turn.rate * factor * g).astype(p.dtype), moments

    return update_in_backward.on_jax(update_rules.in_jax(parts, begin, move))


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "lomo",
            rewrites=("init", "update", "step"),
            calls=("embed", "stack", "loss", "grad"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            conflicts={"sparse_embedding_gradient": "it leaves no gradient of the embedding: leave out one of the two"},
        )
    ]
