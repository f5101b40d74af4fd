"""Step by the sign of a momentum; keep one moment instead of two, pay steps that are all of one size.

Peak: 4 bytes of moments for each parameter instead of 8. The rule is that of Chen et al., 2023 (arXiv:2302.06675): the
sign is taken of the old momentum leant towards the gradient (0.9), then the momentum follows it more slowly (0.99). Its
steps are larger than those of Adam, so the learning rate is multiplied by `factor`; the weight decay acts as before.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, knobs, update_rules

LEAN, FOLLOW = 0.9, 0.99


def on_torch(parts: Parts, factor: float = 0.1) -> Parts:
    import torch

    knobs.above_0("lion", factor=factor)

    def begin(name: str, p: Any) -> list[Any]:
        return [torch.zeros_like(p)]

    def move(turn: update_rules.Turn, p: Any, g: Any, moments: list[Any]) -> None:
        (m,) = moments
        p.mul_(turn.shrink()).add_(m.lerp(g, 1 - LEAN).sign_(), alpha=-turn.rate * factor)
        m.lerp_(g, 1 - FOLLOW)

    return update_rules.in_torch(parts, begin, move)


def on_jax(parts: Parts, factor: float = 0.1) -> Parts:
    import jax.numpy as jnp

    knobs.above_0("lion", factor=factor)

    def begin(name: str, p: Any) -> Any:
        return jnp.zeros_like(p)

    def move(turn: update_rules.Turn, p: Any, g: Any, m: Any) -> tuple[Any, Any]:
        new = p * turn.shrink() - turn.rate * factor * jnp.sign(m + (1 - LEAN) * (g - m))
        return new.astype(p.dtype), (m + (1 - FOLLOW) * (g - m)).astype(m.dtype)

    return update_rules.in_jax(parts, begin, move)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "lion",
            rewrites=("init", "update"),
            calls=("init",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
        )
    ]
