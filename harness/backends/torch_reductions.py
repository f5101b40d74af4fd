"""What reductions of torch take on the CPU beside their results: their array in another type, or a function of it.

Losses make those of all elements first, which they add up. So ATen computes them (`ReduceOps.cpp`, `Loss.cpp`), each by
an order of steps of its own; what a pointwise step copies is in `torch_promotion`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.backends.torch_promotion import Elements, copies, elements, in_place, promoted

aten = torch.ops.aten
LOGITS, SOFT_MARGIN = aten.binary_cross_entropy_with_logits, aten.soft_margin_loss
PLANNED = {aten.mse_loss, aten.smooth_l1_loss}
"""Losses that plan their loop apart from its run, where they are reduced: both copy what is of another type."""
LOSSES = {*PLANNED, aten.huber_loss, SOFT_MARGIN, aten.binary_cross_entropy, LOGITS}
REDUCTION = {aten.binary_cross_entropy: 3, LOGITS: 4}
"""Where the reduction stands among the arguments of a loss, if it is not the third."""
NONE, MEAN = 0, 1


def _copied(array: Elements, result: torch.dtype) -> int:
    return copies([array], result)


def _mean(array: Elements, result: torch.dtype) -> int:
    """Return the bytes of the copy in at least 32 bits."""
    return copies([array], promoted(result, torch.float32) if result.is_floating_point else result)


def _of_exponentials(array: Elements, result: torch.dtype) -> int:
    """Return the bytes of exp(x - largest x), and of numbers made of integers before that."""
    return Elements(array.number, result).size + copies([array], result)


def _truths(array: Elements, _: torch.dtype) -> int:
    """Return the bytes of what says of each element whether it is true."""
    return copies([array], torch.bool)


def _with_places(array: Elements, _: torch.dtype) -> int:
    """Return the bytes of a copy that is sorted in part, and of the place of each of its elements."""
    return array.size + Elements(array.number, torch.int64).size


REDUCTIONS: dict[Any, Callable[[Elements, torch.dtype], int]] = {
    **dict.fromkeys((aten.sum, aten.prod, aten.nansum, aten.linalg_vector_norm, aten.cumsum, aten.cumprod), _copied),
    aten.mean: _mean,
    aten.logsumexp: _of_exponentials,
    **dict.fromkeys((aten.any, aten.all), _truths),
    aten.kthvalue: _with_places,
}
"""Operators, and what they take for an array and the type of their result."""
TAKING = {*REDUCTIONS, *LOSSES}


def scratch(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return the bytes that an operator in `TAKING`, which returned `result`, took beside it."""
    packet = func._overloadpacket
    if packet in LOSSES:
        return _of_loss(packet, args)
    first = result[0] if isinstance(result, tuple) else result
    return REDUCTIONS[packet](elements(args[0]), first.dtype)


def _of_loss(packet: Any, args: Sequence[Any]) -> int:
    where = REDUCTION.get(packet, 2)
    reduction = args[where] if len(args) > where else MEAN
    x, y = elements(args[0]), elements(args[1])
    losses = Elements(max(x.number, y.number), x.dtype)
    before = stays = 0
    if packet is LOGITS:
        losses = y
        before, computing = _of_logits(x, y, *map(_elements_of, (*args[2:4], None, None)[:2]))
        stays = x.size
    elif packet is SOFT_MARGIN:
        computing = in_place(losses, y)
    else:
        common = promoted(x.dtype, y.dtype)
        stays = copies([x, y], common)
        if packet in PLANNED:
            losses = Elements(losses.number, common)
            stays *= 1 if reduction == NONE else 2
        computing = stays + copies([losses], common)
    if reduction == NONE:
        return max(before - losses.size, computing)
    mean = _mean(losses, losses.dtype) if reduction == MEAN else 0
    return max(before, losses.size + computing, losses.size + stays + mean)


def _of_logits(x: Elements, y: Elements, weight: Elements | None, of_ones: Elements | None) -> tuple[int, int]:
    """Return the bytes before the elements are there, and those beside them while they are computed.

    First come log(sigmoid(x)) with a buffer of its size, then its factor, where ones have a weight, then
    (1 - y) * x - log(sigmoid(x)), in place.
    """
    before = 2 * x.size
    if of_ones is not None:
        factor = Elements(max(y.number, of_ones.number), promoted(y.dtype, of_ones.dtype))
        before = max(before, x.size + factor.size + max(copies([y, of_ones], factor.dtype), in_place(x, factor)))
    steps = [in_place(y, x), *([in_place(y, weight)] if weight is not None else [])]
    return before, x.size + max(steps)


def _elements_of(tensor: torch.Tensor | None) -> Elements | None:
    return None if tensor is None else elements(tensor)
