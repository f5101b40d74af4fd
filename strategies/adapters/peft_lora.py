"""Train adapters by PEFT's own layers, drawn and updated as those of `lora`.

Each matrix of a layer is the base of a `peft.tuners.lora.Linear`, which computes the product, the adapter's two, their
sum and every conversion by its own code: a peer to hold `lora` against. The knobs are those of `lora`. Mangrulkar et
al., 2022, "PEFT".
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs
from strategies.adapters.lora import ADAPTERS, CONFLICTS, outputs_first


def on_torch(parts: Parts, rank: int = 16, alpha: float = 32.0, targets: str = "") -> Parts:
    import torch
    from peft import LoraConfig
    from peft.tuners.lora import Linear
    from torch.utils._python_dispatch import _disable_current_modes

    from strategies.adapters.lora._torch import frozen_beside

    knobs.above_0("peft_lora", rank=rank, alpha=alpha)
    inner = parts.linear

    class Base(torch.nn.Linear):
        """A matrix of the model, as PEFT wants it: the sizes of one, and the product of the parts."""

        product: Callable[[Any], Any]

        def forward(self, x: Any) -> Any:
            return self.product(x)

    @cache
    def layer_of(inputs: int, outputs: int) -> Any:
        config = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights=False)
        with _disable_current_modes(), torch.device("meta"):  # a shell: no tensor of it is ever read, nor counted
            return Linear(Base(inputs, outputs, bias=False), "default", config, r=rank, lora_alpha=alpha)

    def linear(parts: Parts, p: Any, name: str, x: Any) -> Any:
        adapter = p.get(ADAPTERS, {}).get(name)
        if adapter is None:
            return inner(parts, p, name, x)
        layer = layer_of(x.shape[-1], len(adapter["b"]))
        layer.base_layer.product = lambda x: inner(parts, p, name, x)
        weights = {"lora_A.default.weight": adapter["a"], "lora_B.default.weight": adapter["b"]}
        try:
            return torch.func.functional_call(layer, weights, x)
        finally:
            del layer.base_layer.product

    return replace(frozen_beside(outputs_first(parts), rank, targets), linear=linear)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "peft_lora",
            rewrites=("init", "linear"),
            calls=("embed", "block", "draw", "init", "linear"),
            on={"torch": on_torch},
            about=__doc__,
            approximate=True,
            own_baseline=True,
            needs=("peft",),
            probe={"rank": 4},
            conflicts={**CONFLICTS, **dict.fromkeys(("lora", "qlora"), "each adapts the same layers: leave one out")},
        )
    ]
