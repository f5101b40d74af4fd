"""Moments in parts, in torch: gradients are summed into parts, each updated by its rank, and all put together again."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Parts, tree
from strategies.sharding._torch import Size, by_rows, dividing, joined, own_part, replace_leaves, sized, summed_part
from strategies.sharding.shares import ROWS


def zero1(parts: Parts) -> Parts:
    """Update a part of every parameter; the moments come with the first update, and so in parts."""
    parts = dividing(parts, by_rows, ROWS)
    inner_init, inner_update = parts.init, parts.update
    inner_reduce_gradients, inner_gather_parameters = parts.reduce_gradients, parts.gather_parameters

    def init(parts: Parts, source: Any = None) -> Any:
        """Make the parameters as they were made: in JAX the moments are made with them."""
        return inner_init(parts, source)

    def reduce_gradients(parts: Parts, loss: Tensor, grads: Any) -> Any:
        def summed(grad: Tensor, size: Size | None) -> Tensor:
            return summed_part(grad) if grad.shape == size else grad

        replace_leaves(grads, sized(parts, grads), summed)
        return inner_reduce_gradients(parts, loss, grads)

    @torch.no_grad()
    def update(parts: Parts, state: Any, grads: Any) -> Any:
        params = state["params"]
        known = sized(parts, params)
        moved = inner_update(parts, {**state, "params": tree.mapped(_part_of, params, known)}, grads)
        return {**moved, "params": tree.mapped(_put_back, params, moved["params"], known)}

    def gather_parameters(parts: Parts, params: Any) -> Any:
        """Make whole what is parted of gradients: the parameters are whole."""

        def made(value: Tensor, size: Size | None) -> Tensor:
            if not size or value.dim() != 1 or value.shape == size:
                return value
            return joined(value.detach(), size)

        return inner_gather_parameters(parts, tree.mapped(made, params, sized(parts, params)))

    return replace(
        parts, reduce_gradients=reduce_gradients, init=init, gather_parameters=gather_parameters, update=update
    )


def _part_of(value: Tensor, size: Size | None) -> Tensor:
    """Return this rank's part of a whole parameter, of its own storage where the parts are equal."""
    if value.shape != size:
        return value
    if value.numel() % dist.get_world_size():
        return own_part(value)
    return value.detach().view(dist.get_world_size(), -1)[dist.get_rank()]


def _put_back(value: Tensor, part: Tensor, size: Size | None) -> Tensor:
    if size is None or value.shape != size:
        return part
    value.detach().copy_(joined(part, size))
    return value
