"""Layers in columns and rows, in torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import Parts, tree
from strategies.sharding._torch import Size, all_gather, dividing, filled, for_all, over_ranks, own_name, sized, sizes
from strategies.sharding.shares import WHOLE
from strategies.sharding.tensor_parallel import DIM, refuse_added


def tensor_parallel(parts: Parts) -> Parts:
    """Hold some heads of attention and some columns of the feed part; sum what each adds to the tokens of all."""
    return dividing(in_columns_and_rows("tensor_parallel", parts, _same_tokens, over_ranks), for_all, WHOLE)


def _same_tokens(parts: Parts, x_BTD: Tensor) -> Tensor:
    """Return the tokens, which are those of all ranks; raise ValueError where each has others."""
    if parts.division.granularity > WHOLE:
        raise ValueError("tensor_parallel needs the whole batch on every rank: leave out what divides the batch")
    return x_BTD


def in_columns_and_rows(
    strategy: str, parts: Parts, before: Callable[[Parts, Tensor], Tensor], after: Callable[[Tensor], Tensor]
) -> Parts:
    """Hold some heads and columns of every layer: `before` gives a part all tokens, `after` sums what the ranks add."""
    inner_draw, inner_mix, inner_feed = parts.draw, parts.mix, parts.feed
    inner_gather_parameters = parts.gather_parameters

    def draw(parts: Parts, name: str, shape: Size, deviation: float) -> Tensor:
        value, R, dim = inner_draw(parts, name, shape, deviation), dist.get_world_size(), _dim(name)
        refuse_added(own_name(name) in sizes(parts), value)
        if dim is None:
            return value
        if value.shape != shape:
            raise ValueError(f"{strategy} parts what another strategy has parted already: leave out one of the two")
        size = -(-shape[dim] // R)  # columns of nothing add nothing, and stay nothing
        return filled(value, size * R, dim, 0).chunk(R, dim)[dist.get_rank()].clone()

    def mix(parts: Parts, p: Any, x_BTD: Tensor) -> Tensor:
        return after(inner_mix(_of_own_heads(strategy, parts), _on_first(p, "bwo"), before(parts, x_BTD)))

    def feed(parts: Parts, p: Any, x_BTD: Tensor) -> Tensor:
        return after(inner_feed(parts, _on_first(p, "bdown"), before(parts, x_BTD)))

    def gather_parameters(parts: Parts, params: Any) -> Any:
        def made(name: str, value: Tensor, size: Size | None) -> Tensor:
            dim = _dim(name)
            if dim is None or size is None or value.shape == size:
                return value
            whole = all_gather(value.detach().movedim(dim, 0)).movedim(0, dim)
            return torch.narrow(whole, dim, 0, size[dim])

        return inner_gather_parameters(parts, tree.mapped(made, tree.names(params), params, sized(parts, params)))

    return replace(parts, draw=draw, mix=mix, feed=feed, gather_parameters=gather_parameters)


def _dim(name: str) -> int | None:
    """Return the dimension by which a parameter is parted."""
    return DIM.get(name.rpartition(".")[2]) if name.startswith("layers.") else None


def _on_first(p: Any, bias: str) -> Any:
    """Keep on one rank alone what is to be added once."""
    return {**p, bias: p[bias] * float(dist.get_rank() == 0)} if bias in p else p


def _of_own_heads(strategy: str, parts: Parts) -> Parts:
    """Set the heads of the layer to those of this rank; raise ValueError where they cannot be divided."""
    shape, R = parts.shape, dist.get_world_size()
    if shape.heads % R or shape.key_heads % R:
        raise ValueError(
            f"{strategy} gives each of {R} ranks as many of {shape.heads} heads and of {shape.key_heads} for keys and "
            "values: take a divisor of both"
        )
    heads = {"heads": shape.heads // R, "kv_heads": shape.key_heads // R, "head_width": shape.head}
    return replace(parts, shape=shape.model_copy(update=heads))
