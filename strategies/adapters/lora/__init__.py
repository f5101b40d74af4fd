"""Train two thin matrices beside each of the layers' own; keep no gradient and no moments of the model itself.

A matrix W of a layer computes W x + alpha / rank B A x, A [rank, in] drawn and B [out, rank] zero, so that the first
step gives the loss of the model bit for bit. W and all else stay as drawn, in their own type; A and B are float32 at
the least, and what they multiply is widened for them, as PEFT does. Gradients and moments take 12 bytes for each number
of A and B instead of each parameter. `targets` names the matrices, as they or the last part of their names are called
(`wq,wv`, `q_proj,v_proj`); all of them where it is empty. Hu et al., 2021, arXiv:2106.09685.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl, knobs

CONFLICTS = dict.fromkeys(
    ("before float8_matmul", "before naive_product", "before tiled_product"),
    "its products take the place of those with adapters: name the adapters after it",
)
"""What no adapters go together with."""

ADAPTERS = "adapters"
"""The key of a layer's parameters under which its adapters are, by the names of their matrices."""
Sizes = dict[str, tuple[int, int]]
"""What a matrix takes and gives, by its name."""


def chosen(names: Collection[str], targets: str) -> set[str]:
    """Return the matrices that are meant. Raises ValueError for a target that is none of them."""
    wanted = [target.strip() for target in targets.split(",") if target.strip()]
    meant = {target: {name for name in names if f".{name}".endswith(f".{target}")} for target in wanted}
    for target, matches in meant.items():
        if not matches:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(f"targets: no matrix of a layer is called '{target}'; there is {known}")
    return set().union(*meant.values()) if wanted else set(names)


MATRICES = ("wq", "wk", "wv", "wo", "up", "gate", "down")
"""What layers call the matrices that multiply through `linear`, where they are not modules with a `weight`."""


def of_shape(parts: Parts) -> Sizes:
    """Return what the matrices of a layer take and give by the model's shape: a rank may hold a part of them."""
    shapes = parts.shape.parameter_shapes()
    sizes = {name: shapes[f"layers.{name}"][0] for name in MATRICES if f"layers.{name}" in shapes}
    return {name: (inputs, outputs) for name, (inputs, outputs) in sizes.items()}


def watched(parts: Parts, sizes: Sizes) -> Parts:
    """Note what the matrices of a layer take and give."""

    def linear(inside: Parts, p: Any, name: str, x: Any) -> Any:
        y = parts.linear(inside, p, name, x)
        sizes[name] = x.shape[-1], y.shape[-1]
        return y

    return replace(parts, linear=linear)


def one_token(parts: Parts) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of a batch of one token, or of one frame."""
    features = getattr(parts.shape, "features", None)
    return ((1, 1), "int32") if features is None else ((1, 1, features), "float32")


def deviation(inputs: int) -> float:
    """Return the deviation of A: that of a uniform distribution within 1 / sqrt(in), which PEFT draws from."""
    return float((3 * inputs) ** -0.5)


def refuse_others(state: Any) -> None:
    """Refuse a state that an optimizer has prepared for the parameters of the whole model."""
    if state.get("moments") is not None or not state.keys() <= {"params", "steps", "moments"}:
        raise ValueError("adapters have moments of their own: name lora or qlora before the optimizer")


def outputs_first(parts: Parts) -> Parts:
    """Tell optimizers that adapters are stored [out, in]."""
    inner = parts.outputs_first
    return replace(parts, outputs_first=lambda name: f".{ADAPTERS}." in name or inner(name))


def on_torch(parts: Parts, rank: int = 16, alpha: float = 32.0, targets: str = "") -> Parts:
    from strategies.adapters.lora._torch import adapted

    knobs.above_0("lora", rank=rank, alpha=alpha)
    return adapted(outputs_first(parts), rank, alpha, targets)


def on_jax(parts: Parts, rank: int = 16, alpha: float = 32.0, targets: str = "") -> Parts:
    from strategies.adapters.lora._jax import adapted

    knobs.above_0("lora", rank=rank, alpha=alpha)
    return adapted(outputs_first(parts), rank, alpha, targets)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "lora",
            rewrites=("init", "linear"),
            calls=("embed", "block", "draw", "init", "linear"),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            approximate=True,
            own_baseline=True,
            probe={"rank": 4},
            conflicts=CONFLICTS | {"qlora": "both train adapters beside the same matrices: choose one of them"},
        )
    ]
