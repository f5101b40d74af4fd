"""Keep what the weights of the layers are multiplied with as 8-bit integers; pay rounding of the weights' gradients.

Peak: a byte for each number that a product with a weight keeps for its backward pass instead of 4, and a scale for each
`group` of them; what norms, softmax and gates keep stays as it is, since their errors would spread to the layers below.
The products themselves and the gradients of the inputs are exact. A number is round(127 x / max |x|) of its group, each
input is rounded once however many weights it meets, and is wide again for one product at a time. (GACT: Liu et al.,
2022, arXiv:2206.11357; groups as in COAT: Xi et al., 2024, arXiv:2410.19313.) Inputs of a mixture's experts stay wide:
one grouped product, which is not replaced, multiplies them with all matrices. torch only: a compiled step of JAX shows
no single products to a strategy.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl

STEPS = 127


def on_torch(parts: Parts, group: int = 128) -> Parts:
    if group < 1:
        raise ValueError(f"int8_activations: a group of {group} numbers has no largest one: set group to 1 or more")
    from strategies.activations.int8_activations._torch import RoundedProducts

    inner = parts.block

    def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
        with RoundedProducts(group):
            return inner(parts, p, x_BTD)

    return replace(parts, block=block)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "int8_activations",
            rewrites=("block",),
            on={"torch": on_torch},
            about=__doc__,
            precision="int8",
            probe={"group": 16},
            conflicts={
                **dict.fromkeys(
                    ("feed_checkpoint", "tiled_feed", "recomputed_activation"),
                    "a part of a layer is recomputed without rounding its products: use `checkpoint` beside it",
                ),
                **dict.fromkeys(
                    ("float8_matmul", "naive_product", "tiled_product"),
                    "that keeps what it multiplies by itself, so that nothing is rounded",
                ),
            },
        )
    ]
