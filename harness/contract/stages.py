"""What a first step holds after each of its stages: the profile of a run before an optimizer has moments."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from harness.contract.parts import ABSENT, Parts

STAGES = ("parameters", "embedding", "first layer", "forward", "loss")
"""The stages in their order. `forward` ends where the loss begins."""


@dataclass(frozen=True)
class Profile:
    """Fills `stages`: what `in_use()` counts after each, and of the loss `most()`, the most since it began.

    The loss lasts until the gradient of its hidden states. Each stage is that of the first step alone.
    While a compiler looks at the code (`tracing()`) nothing is noted: to read the memory would cut its graph in two.
    """

    in_use: Callable[[], int]
    most: Callable[[], int]
    tracing: Callable[[], bool] = lambda: False
    stages: dict[str, int] = field(default_factory=dict)

    def of(self, parts: Parts) -> Parts:
        """Watch the parts that end a stage."""
        return replace(
            parts,
            init=self._ends(parts.init, "parameters"),
            embed=self._ends(parts.embed, "embedding"),
            block=self._ends(parts.block, "first layer"),
            loss=self._loss(parts.loss),
        )

    def _note(self, name: str, bytes_of: Callable[[], int]) -> None:
        if name not in self.stages and not self.tracing():
            self.stages[name] = bytes_of()

    def _ends(self, part: Callable[..., Any], name: str) -> Callable[..., Any]:
        if part is ABSENT:
            return part

        @wraps(part)
        def ended(*args: Any, **kwargs: Any) -> Any:
            result = part(*args, **kwargs)
            self._note(name, self.in_use)
            return result

        return ended

    def _loss(self, part: Callable[..., Any]) -> Callable[..., Any]:
        if part is ABSENT:
            return part

        @wraps(part)
        def loss(parts: Parts, x_BTD: Any, *rest: Any) -> Any:
            self._note("forward", self.in_use)
            if "loss" not in self.stages and getattr(x_BTD, "requires_grad", False) and not self.tracing():
                x_BTD.register_hook(lambda gradient: self._note("loss", self.most))
            return part(parts, x_BTD, *rest)

        return loss
