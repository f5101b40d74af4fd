"""Moments and gradients in parts, in torch: autograd is asked for the gradients of parts of what is whole."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Parts, tree
from strategies.sharding._torch import Size, mapped_by_size, sized, sizes, summed_part
from strategies.sharding.shares import OF_EMBED
from strategies.sharding.zero1._torch import zero1


def zero2(parts: Parts) -> Parts:
    """Sum each gradient into the parts where it is made; the rest is `zero1`."""
    parts = zero1(parts)
    inner = parts.grad

    def grad(parts: Parts, state: Any, x: Tensor, y: Tensor) -> Any:
        size_of, block_, loss_, embed_ = sizes(parts), parts.block, parts.loss, parts.embed
        whole: dict[int, Tensor] = {}

        def stand_in(value: Tensor, size: Size | None) -> Tensor:
            """Return a leaf of the size of a part, without memory of its own, in the place of a whole parameter."""
            if size is None or len(size) < 2 or value.shape != size:
                return value
            rows = -(-value.numel() // dist.get_world_size())
            part = value.new_empty(1).expand(rows).detach().requires_grad_()
            whole[id(part)] = value.detach()
            return part

        def of(value: Any, size: Size) -> Any:
            if id(value) in whole:
                return _Summed.apply(value, whole[id(value)])
            if whole and isinstance(value, Tensor) and value.dim() < len(size):
                raise ValueError("zero2: another strategy computes in copies of its parts: name it after zero2")
            return value

        def block(parts: Parts, p: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
            return block_(parts, mapped_by_size(of, p, size_of), x_BTD)

        def loss(parts: Parts, x_BTD: Tensor, w_VD: Tensor, y_BT: Tensor) -> Tensor:
            return loss_(parts, x_BTD, of(w_VD, w_VD.shape), y_BT)

        def embed(parts: Parts, params: Any, x_BT: Tensor) -> Tensor:
            read = {key: mapped_by_size(of, params[key], size_of, key) for key in OF_EMBED if key in params}
            return embed_(parts, {**params, **read}, x_BT)

        params = tree.mapped(stand_in, state["params"], sized(parts, state["params"]))
        return inner(replace(parts, block=block, loss=loss, embed=embed), {**state, "params": params}, x, y)

    return replace(parts, grad=grad)


class _Summed(torch.autograd.Function):
    """A whole parameter in the place of a part of it; its gradient is summed into the parts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed_part(grad), None
