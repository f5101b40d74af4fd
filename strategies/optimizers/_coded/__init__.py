"""Adam with its moments as codes: levels, blocks that share a scale, and codes that share a byte."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, knobs, tree

SLICE = 1 << 20
"""Elements that are wide at a time."""


@dataclass(frozen=True)
class Codes:
    """How moments are coded: `levels(signed)` in ascending order, elements `block` to a scale, and `bits` of a code.

    Of the first moment, which has a sign, the levels lie in [-1, 1]; of the second, which has none, in [0, 1].
    `least_second` is the lowest code that a second moment may have.
    """

    levels: Callable[[bool], Any]
    block: int
    bits: int
    least_second: int

    @property
    def bytes_of_block(self) -> int:
        """The bytes of the codes of one block."""
        return self.block * self.bits // 8

    def middles(self, signed: bool) -> Any:
        """Return the values at which the nearest level changes."""
        import numpy as np

        of = self.levels(signed).astype(np.float64)
        return ((of[:-1] + of[1:]) / 2).astype(np.float32)

    def zero(self, signed: bool) -> int:
        """Return the byte of codes that stand for 0, or for the level nearest to it."""
        import numpy as np

        code = int(np.abs(self.levels(signed)).argmin())
        return code if self.bits == 8 else code * 17


def on_torch(codes: Codes, parts: Parts, least: int = 4096) -> Parts:
    from strategies.optimizers._coded import _torch

    knobs.at_least_0(f"adam_{codes.bits}bit", least=least)
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(parts, source)
        return {**state, "moments": tree.mapped(lambda p: _torch.begin(codes, p, least), state["params"])}

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        return _torch.update(codes, parts, state, grads)

    return replace(parts, init=init, update=update)


def on_jax(codes: Codes, parts: Parts, least: int = 4096) -> Parts:
    from strategies.optimizers._coded import _jax

    knobs.at_least_0(f"adam_{codes.bits}bit", least=least)
    inner = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner(replace(parts, moments=frozenset()), source)
        names = tree.names(state["params"])
        for key, signed in (("first", True), ("second", False)):
            state[key] = tree.mapped(
                lambda p, name, signed=signed: _jax.begin(codes, p, name, signed, least), state["params"], names
            )
        return state

    def update(parts: Parts, state: Any, grads: Any) -> Any:
        return _jax.update(codes, parts, state, grads)

    return replace(parts, init=init, update=update)


def strategy(name: str, codes: Codes, about: str) -> Strategy:
    """Return the strategy of Adam whose moments are coded so."""
    return Strategy(
        name,
        rewrites=("init", "update"),
        calls=("init",),
        on={"torch": partial(on_torch, codes), "jax": partial(on_jax, codes)},
        about=about,
        approximate=True,
        probe={"least": 64},
    )
