"""What passes between ranks in torch, and how they divide a batch, its gradients and the parameters.

The loss of a batch is the sum of what the ranks compute. So the gradient of a parameter that every rank holds is the
sum of theirs, and the backward pass of each collective is its transpose: of gathering, summing into parts; of summing,
summing; of exchanging, exchanging back.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import IGNORED, Parts, tree
from strategies.sharding import shares

Size = tuple[int, ...]
Collective = Callable[[Tensor], Tensor]


def all_gather(part: Tensor) -> Tensor:
    """Put the parts [n, ...] of all ranks, of one size, after each other: [R n, ...]."""
    part = part.contiguous()
    whole = part.new_empty(dist.get_world_size() * part.shape[0], *part.shape[1:])
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, part)
    return whole


def reduce_scatter(whole: Tensor) -> Tensor:
    """Sum [R n, ...] over all ranks and keep the own part [n, ...]."""
    whole = whole.contiguous()
    part = whole.new_empty(whole.shape[0] // dist.get_world_size(), *whole.shape[1:])
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, whole)
    return part


def all_reduce(value: Tensor, largest: bool = False) -> Tensor:
    """Sum over all ranks in place, or take the largest."""
    dist.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return value


def all_to_all(parts: Tensor) -> Tensor:
    """Send part r of [R, ...] to rank r, and return what came from each."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received


def passed_on(*values: Tensor) -> list[Tensor]:
    """Send each value to the next rank and return those of the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if dist.get_backend() == "fake":
        return [torch.empty_like(value) for value in values]
    received = [torch.empty_like(value) for value in values]
    sent = [dist.P2POp(dist.isend, value.contiguous(), (rank + 1) % ranks) for value in values]
    expected = [dist.P2POp(dist.irecv, value, (rank - 1) % ranks) for value in received]
    for work in dist.batch_isend_irecv([*sent, *expected]):
        work.wait()
    return received


class _Collective(torch.autograd.Function):
    """One that is linear, with its transpose as the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, there: Collective, back: Collective) -> Tensor:
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def gathered(part: Tensor) -> Tensor:
    """`all_gather` along the first dimension, differentiated."""
    return _Collective.apply(part, all_gather, reduce_scatter)


def scattered(whole: Tensor) -> Tensor:
    """`reduce_scatter` along the first dimension, differentiated."""
    return _Collective.apply(whole, reduce_scatter, all_gather)


def over_ranks(value: Tensor) -> Tensor:
    """`all_reduce` of a copy, differentiated."""
    return _Collective.apply(value, _reduced_copy, _reduced_copy)


def exchanged(parts: Tensor) -> Tensor:
    """`all_to_all` along the first dimension, differentiated."""
    return _Collective.apply(parts, all_to_all, all_to_all)


def _reduced_copy(value: Tensor) -> Tensor:
    return all_reduce(value.clone())


def own_part(whole: Tensor) -> Tensor:
    """Keep this rank's part [ceil(n / R)] of the values [n] of a tensor, the last one filled up with zeros."""
    size = -(-whole.numel() // dist.get_world_size())
    part = whole.new_zeros(size)
    values = whole.detach().reshape(-1)[dist.get_rank() * size :][:size]
    part[: len(values)] = values
    return part


def own_rows(whole: Tensor) -> Tensor:
    """Keep this rank's rows [ceil(n / R), ...] of [n, ...], the last ones filled up with zeros."""
    size = -(-len(whole) // dist.get_world_size())
    return filled(whole[dist.get_rank() * size :][:size], size, 0, 0).clone()


def joined(part: Tensor, size: Size) -> Tensor:
    """Make a tensor whole of what the ranks hold of it."""
    return all_gather(part)[: torch.Size(size).numel()].view(size)


def summed_part(whole: Tensor) -> Tensor:
    """Sum a tensor over all ranks and keep this one's part of it."""
    ranks, flat = dist.get_world_size(), whole.reshape(-1)
    missing = -len(flat) % ranks
    return reduce_scatter(torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)


def sizes(parts: Parts) -> dict[str, Size]:
    """Return the size of each parameter by its name; one of a layer stands for all layers, by its short name.

    A matrix that follows the layers (a projection of OPT) has none here: every rank holds it whole.
    """
    shapes = parts.shape.parameter_shapes().items()
    return {
        name.removeprefix("layers."): size
        for name, (size, _) in shapes
        if len(size) < 2 or not name.startswith("norm.")
    }


def classifier_size(sizes: Mapping[str, Size], part: Tensor, width: int) -> Size:
    """Return the size [rows, width] of the classifier's matrix, of which a rank holds a part: an embedding's if tied.

    Its rows are not always as many as the ids, and an embedding may have other matrices.
    """
    of_width = (size for name, size in sizes.items() if name.startswith("embed") and size[1:] == (width,))
    tied = (size for size in of_width if -(-prod(size) // dist.get_world_size()) == part.numel())
    return sizes["head"] if "head" in sizes else next(tied, tuple(part.shape))


def mapped_by_size(
    function: Callable[[Tensor | dict[str, Tensor], Size], Any], p: Any, sizes: Mapping[str, Size], name: str = ""
) -> Any:
    """Put `function(parameter, size)` in the place of each parameter of the model; others stay, as adapters do.

    `p` is one parameter by the `name` of its size, or a dict of them, in which one that is packed is a dict as well.
    """
    if name in sizes:
        return function(p, sizes[name])
    if not isinstance(p, dict):
        return p
    return {key: mapped_by_size(function, value, sizes, f"{name}.{key}" if name else key) for key, value in p.items()}


def own_name(name: str) -> str:
    """Return the name of a parameter without the layer that it is in."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def sized(parts: Parts, params: Any) -> Any:
    """Put the size of each parameter in its place; None for one that a strategy added, which every rank holds whole."""
    whole = sizes(parts)
    return tree.mapped(lambda name: whole.get(own_name(name)), tree.names(params))


def replace_leaves(tree_: Any, sizes_: Any, function: Callable[[Tensor, Size | None], Tensor]) -> None:
    """Put `function(leaf, size)` in the place of each leaf, so that each is dropped before the next is made."""
    for key in list(tree_) if isinstance(tree_, dict) else range(len(tree_)):
        if isinstance(tree_[key], Tensor):
            tree_[key] = function(tree_[key], sizes_[key])
        else:
            replace_leaves(tree_[key], sizes_[key], function)


def dividing(parts: Parts, shard_batch: Callable[..., Any], granularity: int) -> Parts:
    """Divide the batch by `shard_batch`, so finely, and sum what every rank holds whole."""
    return shares.dividing(parts, shard_batch, granularity, summed)


def summed(parts: Parts, loss: Tensor, grads: Any) -> tuple[Tensor, Any]:
    """Sum the loss, and in place the gradients of parameters that every rank holds whole: what is divided is summed."""

    def reduced(grad: Tensor, size: Size | None) -> Tensor:
        return all_reduce(grad.contiguous()) if size is None or grad.shape == size else grad

    return all_reduce(loss.clone()), tree.mapped(reduced, grads, sized(parts, grads))


def by_rows(parts: Parts, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many rows of the batch as every rank has; the last ones are filled up with rows that do not count."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = -(-len(x) // ranks)
    if (used := -(-len(x) // size)) < ranks:
        parts.notes["ranks"] = f"a batch of {shares.rows(len(x))} leaves {ranks - used} of {ranks} ranks without any"
    return weighed(*(filled(each[rank * size :][:size], size, 0, nothing) for each, nothing in ((x, 0), (y, IGNORED))))


def by_tokens(parts: Parts, x: Tensor, y: Tensor, blocks: Callable[[int, int], tuple[int, ...]]) -> Any:
    """Return some of the equal blocks into which each row is cut, the last ones filled up with ignored tokens.

    `blocks(rank, ranks)` names them among as many for each rank.
    """
    own_spans = spans(x.shape[1], blocks)

    def cut(values: Tensor, nothing: int) -> Tensor:
        return torch.cat([filled(values[:, span], span.stop - span.start, 1, nothing) for span in own_spans], 1)

    return weighed(cut(x, 0), cut(y, IGNORED))


def in_a_stretch(parts: Parts, tokens: int) -> tuple[slice, ...]:
    """Return the positions of this rank's tokens, where each rank has one stretch of every row, in their order."""
    start = dist.get_rank() * tokens
    return (slice(start, start + tokens),)


def spans(tokens: int, blocks: Callable[[int, int], tuple[int, ...]]) -> tuple[slice, ...]:
    """Return the positions of this rank's blocks, of which the last may lie beyond the row."""
    own_blocks = blocks(dist.get_rank(), dist.get_world_size())
    size = -(-tokens // (dist.get_world_size() * len(own_blocks)))
    return tuple(slice(block * size, (block + 1) * size) for block in own_blocks)


def filled(values: Tensor, size: int, dim: int, nothing: int) -> Tensor:
    """Fill a dimension up to a size."""
    missing = size - values.shape[dim]
    if not missing:
        return values
    more = list(values.shape)
    more[dim] = missing
    return torch.cat([values, values.new_full(more, nothing)], dim)


def for_all(parts: Parts, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the whole batch, as on every rank: each loss counts as one of R."""
    return x, y, 1 / dist.get_world_size()


def weighed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh a part of the batch by the targets in it that count: the mean over all is no mean of means.

    A part without any gets one, and no weight: a mean over nothing is no number. The loss of a batch without any
    is 0.
    """
    targets = (y != IGNORED).sum()
    weight = targets / all_reduce(targets.clone()).clamp_(min=1)
    first = torch.zeros_like(y, dtype=torch.bool)
    first[(0,) * y.dim()] = True
    return x, torch.where(first & (targets == 0), 0, y), weight


def tokens_by(blocks: Callable[[int, int], tuple[int, ...]]) -> Callable[..., Any]:
    """Divide rows of tokens by blocks."""
    return partial(by_tokens, blocks=blocks)
