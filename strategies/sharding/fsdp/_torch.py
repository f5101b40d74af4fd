"""Parameters in parts, in torch: whole while a function runs, and made whole again for its backward pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from harness import Parts, tree
from strategies.sharding._torch import (
    Size,
    all_gather,
    by_rows,
    classifier_size,
    dividing,
    joined,
    mapped_by_size,
    own_name,
    own_part,
    own_rows,
    sized,
    sizes,
    summed_part,
)
from strategies.sharding.shares import OF_EMBED, ROWS


def fsdp(parts: Parts) -> Parts:
    """Hold a part of every parameter that has rows, and make those of a block whole around it."""
    if getattr(parts.shape, "head_bias", False):
        raise ValueError("fsdp: a head with a bias is not divided: leave out `head_bias`")
    inner_draw, inner_grad, inner_gather_parameters = parts.draw, parts.grad, parts.gather_parameters

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        if isinstance(value, dict):
            return {**value, "codes": own_rows(value["codes"])}
        divisible = len(shape) > 1 and own_name(name) in sizes(parts)
        return own_part(value) if divisible and value.shape == shape else value

    def grad(parts: Parts, state: Any, x: Tensor, y: Tensor) -> Any:
        size_of, block_, loss_, embed_ = sizes(parts), parts.block, parts.loss, parts.embed

        def block(parts: Parts, p: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
            whole = _Whole()
            return whole.during(block_, parts, mapped_by_size(whole.of, p, size_of), x_BTD)

        def loss(parts: Parts, x_BTD: Tensor, w_VD: Tensor, y_BT: Tensor) -> Tensor:
            whole, size = _Whole(), classifier_size(size_of, w_VD, x_BTD.shape[-1])
            return whole.during(loss_, parts, x_BTD, whole.of(w_VD, size), y_BT)

        def embed(parts: Parts, params: Any, x_BT: Tensor) -> Tensor:
            whole = {key: mapped_by_size(_Whole().of, params[key], size_of, key) for key in OF_EMBED if key in params}
            return embed_(parts, {**params, **whole}, x_BT)

        return inner_grad(replace(parts, block=block, loss=loss, embed=embed), state, x, y)

    def gather_parameters(parts: Parts, params: Any) -> Any:
        def made(value: Tensor, size: Size | None) -> Tensor:
            return joined(value.detach(), size) if size and _is_part(value, size) else value

        return inner_gather_parameters(parts, tree.mapped(made, params, sized(parts, params)))

    parts = replace(parts, draw=draw, grad=grad, gather_parameters=gather_parameters)
    return dividing(parts, by_rows, ROWS)


class _Packed(dict[str, Tensor]):
    """A packed matrix of so many rows, whose codes are made whole whenever they are read, and kept nowhere."""

    def __init__(self, packed: dict[str, Tensor], rows: int) -> None:
        super().__init__(packed)
        self.rows = rows

    def __getitem__(self, key: str) -> Tensor:
        value = super().__getitem__(key)
        return all_gather(value)[: self.rows] if key == "codes" else value


def _is_part(value: Tensor, size: Size) -> bool:
    return len(size) > 1 and value.dim() == 1


class _Joined(torch.autograd.Function):
    """A tensor made whole of its parts; its gradient is summed into them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, size: Size) -> Tensor:
        return joined(part, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed_part(grad), None


class _Whole:
    """Parameters that are whole while a function runs; autograd saves of them the parts, and makes them whole again.

    `made` knows by their storage what they were made of. Where something else decides what is saved (a checkpoint,
    offloading), that is left to it.
    """

    def __init__(self) -> None:
        self.made: dict[int, tuple[Tensor, Size]] = {}

    def of(self, value: Any, size: Size) -> Any:
        """Make a parameter whole, if it is a part of one of this size."""
        if isinstance(value, dict):
            return _Packed(value, size[0])
        if not _is_part(value, size):
            return value
        whole: Tensor = _Joined.apply(value, size)
        self.made[whole.untyped_storage()._cdata] = value.detach(), size
        return whole

    def during(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function that uses them."""
        if not self.made or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return function(*args)
        with saved_tensors_hooks(self._pack, _unpack):
            return function(*args)

    def _pack(self, value: Tensor) -> Any:
        part = self.made.get(value.untyped_storage()._cdata)
        return value if part is None else (*part, value.size(), value.stride(), value.storage_offset())


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    part, size, *view = packed
    return joined(part, size).as_strided(*view)
