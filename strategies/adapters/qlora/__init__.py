"""Train adapters beside matrices of 4 bits; keep no wide copy of them, and widen each one twice a step.

Each matrix of a layer is rounded as it is drawn: to the nearest of the 16 NormalFloat levels in its block of 64
numbers, whose largest magnitude scales them; the scales, less their mean, are 8-bit floats in blocks of 256 with a
float32 scale of their own. That is 4.127 bits a number instead of 32. A matrix is widened to the type in which it was
drawn when it multiplies, and again in the backward pass: nothing of it is kept between, but under autocast in torch a
copy in 16 bits. Embedding, head and norms stay as drawn. So do experts, whose matrices are stacked in one array: 97 %
of Mixtral 8x7B. The adapters are those of `lora`, with its knobs. Dettmers et al., 2023, arXiv:2305.14314.
"""

from typing import Any

from harness import Parts, Strategy, hookimpl, knobs
from strategies.adapters.lora import CONFLICTS, MATRICES

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 levels of NormalFloat: appendix E of the paper."""
BLOCK, OUTER = 64, 256
"""Numbers with one scale, and scales with one of theirs."""
ROUTERS = {"gate", "router"}
"""What transformers calls the matrix that chooses experts: it does not multiply through `linear`."""
OF_PARTS = "qlora packs whole matrices: name it before fsdp, and leave out whatever else divides them among ranks"
"""What is said of a part: its blocks would be others than those of the whole matrix."""
LARGEST = 448.0
"""The largest 8-bit float (e4m3)."""


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a matrix of a layer that multiplies through `linear`, or in JAX of all layers."""
    if not name.startswith("layers.") or "adapters" in name or shape[-1] % 2:
        return False
    stacked = not name.split(".")[1].isdigit()
    of_module = name.endswith(".weight") and not ROUTERS.intersection(name.split("."))
    return len(shape) == 2 + stacked and (of_module or name.rpartition(".")[2] in MATRICES)


def on_torch(parts: Parts, rank: int = 16, alpha: float = 32.0, targets: str = "") -> Parts:
    from strategies.adapters import lora
    from strategies.adapters.qlora._torch import quantised

    knobs.above_0("qlora", rank=rank, alpha=alpha)
    return lora.on_torch(quantised(parts), rank, alpha, targets)


def on_jax(parts: Parts, rank: int = 16, alpha: float = 32.0, targets: str = "") -> Parts:
    from strategies.adapters import lora
    from strategies.adapters.qlora._jax import quantised

    knobs.above_0("qlora", rank=rank, alpha=alpha)
    return lora.on_jax(quantised(parts), rank, alpha, targets)


def wide(p: Any, name: str) -> str:
    """Return under which name a layer has a matrix: its own, or with `.weight` behind it."""
    return name if name in p else f"{name}.weight"


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "qlora",
            rewrites=("draw", "init", "linear"),
            calls=("embed", "block", "draw", "init", "linear"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            own_baseline=True,
            probe={"rank": 4},
            conflicts={
                **CONFLICTS,
                "lora": "both train adapters beside the same matrices: choose one of them",
                **dict.fromkeys(
                    ("tensor_parallel", "megatron_sequence_parallel"),
                    "whole matrices are divided, and not packed ones: take fsdp",
                ),
                "before bfloat16": "it would cast what is packed: name it after",
                "before bfloat16_stochastic": "it would cast what is packed: name bfloat16 before qlora in its place",
            },
        )
    ]
