"""Parameters in parts, in JAX: those of a block are made whole within the scan over the layers."""

from dataclasses import replace
from typing import Any

import jax

from harness import Parts
from strategies.sharding._jax import all_gather, by_rows, dividing, drawn_divided, gathered, in_turn, rows_axis, sizes


def fsdp(parts: Parts) -> Parts:
    """Hold a part of every matrix, and make those of a block whole within the scan over the layers."""
    inner_grad = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        size_of, block_, loss_, embed_ = sizes(parts), parts.block, parts.loss, parts.embed

        def whole(name: str, part: Any) -> Any:
            rows = size_of[name][rows_axis(name)]
            return part if part.ndim < 2 or len(part) == rows else all_gather(parts, part)[:rows]

        def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
            def of_parts(p: Any, x_BTD: Any) -> Any:
                return block_(parts, {name: whole(f"layers.{name}", part) for name, part in p.items()}, x_BTD)

            return jax.checkpoint(of_parts, policy=all_but_whole, prevent_cse=False)(p, x_BTD)

        def loss(parts: Parts, x_BTD: Any, w_VD: Any, y_BT: Any) -> Any:
            if takes_rows(loss_):
                return loss_(parts, x_BTD, w_VD, y_BT)
            x_BTD, w_VD = in_turn(x_BTD, w_VD) if parts.ranks > 1 else (x_BTD, w_VD)
            return loss_(parts, x_BTD, whole("embed", w_VD), y_BT)

        def embed(parts: Parts, params: Any, x_BT: Any) -> Any:
            w_VD = params["embed"]
            return embed_(parts, {**params, "embed": w_VD if takes_rows(embed_) else whole("embed", w_VD)}, x_BT)

        return inner_grad(replace(parts, block=block, loss=loss, embed=embed), state, x, y)

    draw, gather = drawn_divided(parts.draw), gathered(parts.gather)
    return replace(parts, draw=draw, grad=grad, gather=gather, **dividing(parts, by_rows))


def takes_rows(part: Any) -> bool:
    """Say whether a part takes the rows that this rank holds, see `vocabulary_parallel_loss`."""
    return getattr(part, "over_vocabulary", False)


def all_but_whole(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what a block would save, but for parameters made whole: gathered, and what was filled up cut off."""
    return primitive.name not in ("all_gather", "slice")
