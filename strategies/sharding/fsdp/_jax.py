"""Parameters in parts, in JAX: those of a block are made whole within the scan over the layers."""

from dataclasses import replace
from typing import Any

import jax

from harness import Parts
from strategies.sharding._jax import all_gather, by_rows, dividing, drawn_divided, gathered, in_turn, rows_axis, sizes
from strategies.sharding.shares import OF_EMBED, ROWS


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
            if "loss" in parts.division.over_vocabulary:
                return loss_(parts, x_BTD, w_VD, y_BT)
            x_BTD, w_VD = in_turn(x_BTD, w_VD) if parts.ranks > 1 else (x_BTD, w_VD)
            return loss_(parts, x_BTD, whole("embed", w_VD), y_BT)

        def embed(parts: Parts, params: Any, x_BT: Any) -> Any:
            names = [name for name in OF_EMBED if name in params and name not in parts.division.over_vocabulary]
            return embed_(parts, {**params, **{name: whole(name, params[name]) for name in names}}, x_BT)

        return inner_grad(replace(parts, block=block, loss=loss, embed=embed), state, x, y)

    draw, gather_parameters = drawn_divided(parts.draw), gathered(parts.gather_parameters)
    parts = replace(parts, draw=draw, grad=grad, gather_parameters=gather_parameters)
    return dividing(parts, by_rows, ROWS)


def all_but_whole(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what a block would save, but for parameters made whole: gathered, and what was filled up cut off."""
    return primitive.name not in ("all_gather", "slice")
