"""Parameters in parts, in JAX: those of a block are made whole within the scan over the layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from harness import Parts
from strategies.sharding._jax import (
    AXIS,
    Size,
    all_gather,
    by_rows,
    divided,
    dividing,
    drawn_divided,
    gathered,
    in_turn,
    lies_divided,
    rows_axis,
    sizes,
)
from strategies.sharding.shares import OF_EMBED, ROWS


def fsdp(parts: Parts) -> Parts:
    """Hold a part of every matrix, and make those of a block whole within the scan over the layers."""
    inner_grad = parts.grad

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        size_of, block_, loss_, embed_ = sizes(parts), parts.block, parts.loss, parts.embed

        def whole(name: str, part: Any) -> Any:
            if name not in size_of:
                return part
            rows = size_of[name][rows_axis(name)]
            if isinstance(part, dict):
                return _Packed(part, rows, parts.ranks)
            return part if part.ndim < 2 or len(part) == rows else all_gather(parts, part)[:rows]

        def block(parts: Parts, p: Any, x_BTD: Any) -> Any:
            def of_parts(p: Any, x_BTD: Any) -> Any:
                return block_(parts, {name: whole(f"layers.{name}", part) for name, part in p.items()}, x_BTD)

            if all(whole(f"layers.{name}", part) is part or isinstance(part, dict) for name, part in p.items()):
                return of_parts(p, x_BTD)  # packed matrices are made whole again by themselves
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

    inner_draw, gather_parameters = parts.draw, gathered(parts.gather_parameters)

    def of_whole_layers(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        if name.startswith("layers.") and not isinstance(value, dict) and lies_divided(value):
            raise ValueError("fsdp parts what another strategy has parted already: leave out one of the two")
        return value

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = drawn_divided(of_whole_layers)(parts, name, shape, deviation)
        return {**value, "codes": divided(parts, name, value["codes"])} if isinstance(value, dict) else value

    parts = replace(parts, draw=draw, grad=grad, gather_parameters=gather_parameters)
    return dividing(parts, by_rows, ROWS)


@jax.tree_util.register_pytree_node_class
class _Packed(dict[str, Any]):
    """A packed matrix of so many rows, whose codes are made whole whenever they are read."""

    def __init__(self, packed: Mapping[str, Any], rows: int, ranks: int) -> None:
        super().__init__(packed)
        self.rows, self.ranks = rows, ranks

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key != "codes" or self.ranks == 1:
            return value
        return jax.lax.all_gather(value, AXIS, tiled=True)[: self.rows]

    def tree_flatten(self) -> tuple[tuple[dict[str, Any]], tuple[int, int]]:
        return (dict(self.items()),), (self.rows, self.ranks)

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int], packed: tuple[dict[str, Any]]) -> "_Packed":
        return cls(packed[0], *sizes)


def all_but_whole(primitive: Any, *_: Any, **__: Any) -> bool:
    """Save what a block would save, but for parameters made whole: gathered, and what was filled up cut off."""
    return primitive.name not in ("all_gather", "slice")
