"""Segments of a row after each other in torch, with the states of each layer between them."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness import IGNORED, Parts, tree
from strategies.scan.chunked_recurrence import lengths
from strategies.scan.truncated_bptt import WITHOUT

States = dict[int, Any]
"""The states that each layer leaves, by its number in the stack."""


def truncated(parts: Parts, steps: int) -> Parts:
    """Take the gradient segment by segment."""
    inner = parts.grad

    def grad(parts: Parts, state: Any, x_BTF: Tensor, y_BT: Tensor) -> Any:
        total = (y_BT != IGNORED).sum()
        segments = lengths(x_BTF.shape[1], steps)
        loss, sums, left = torch.zeros((), device=x_BTF.device), None, States()
        for x_BCF, y_BC in zip(x_BTF.split(segments, 1), y_BT.split(segments, 1), strict=True):
            carrying, left = _carrying(parts, left)
            value, grads = inner(carrying, state, x_BCF, y_BC)
            count = (y_BC != IGNORED).sum()
            loss = loss + torch.where(count > 0, value * count, 0)  # a mean of none is no number
            grads = tree.mapped(partial(_weighed_, count, count / total), grads)
            sums = grads if sums is None else tree.mapped(Tensor.add_, sums, grads)
            del grads
        return loss / total, sums

    return replace(parts, grad=grad)


def _weighed_(count: Tensor, share: Tensor, gradient: Tensor) -> Tensor:
    """Multiply the gradient of a segment by its share of all targets; without a target it has none."""
    return gradient.mul_(share.to(gradient.dtype)).masked_fill_(count == 0, 0)


def _carrying(parts: Parts, before: States) -> tuple[Parts, States]:
    """Let each layer begin with the states of the segment before; return also where it puts those of its own end."""
    stack_, recur_, left = parts.stack, parts.recur, States()

    def stack(parts: Parts, ps: Any, x_BCD: Tensor) -> Tensor:
        for layer, p in enumerate(ps):

            def recur(parts: Parts, p: Any, x_BCD: Tensor, _: Any, layer: int = layer) -> Any:
                y_BCD, states = recur_(parts, p, x_BCD, before.get(layer))
                left[layer] = tree.mapped(Tensor.detach, states)
                return y_BCD, states

            x_BCD = stack_(replace(parts, recur=recur), [p], x_BCD)
            if layer not in left:
                raise ValueError(WITHOUT)
        return x_BCD

    return replace(parts, stack=stack), left
