"""Reversible layers in torch, as one `torch.autograd.Function`."""

from collections.abc import Iterator
from typing import Any

import torch

from harness import Parts, tree
from strategies.activations.reversible import branches


class Reversible(torch.autograd.Function):
    """Run all layers without a graph; undo them one by one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, parts: Parts, ps: Any, x_BTD: Any, *weights: Any) -> Any:
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        first = second = x_BTD.to(wide)
        f, g = branches(parts)
        for p in ps:
            first = first + f(p, second.to(x_BTD.dtype))
            second = second + g(p, first.to(x_BTD.dtype))
        ctx.parts, ctx.ps, ctx.dtype = parts, ps, x_BTD.dtype
        ctx.save_for_backward(first, second)
        return ((first + second) / 2).to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Any) -> Any:
        first, second = ctx.saved_tensors
        d_first = d_second = grad_BTD.to(first.dtype) / 2
        f, g = branches(ctx.parts)
        d_layers = []
        for p in reversed(ctx.ps):
            second, d_first, d_p = undone(g, p, first, second, d_second, d_first, ctx.dtype)
            first, d_second, d_q = undone(f, p, second, first, d_first, d_second, ctx.dtype)
            d_layers.append([added(a, b) for a, b in zip(d_p, d_q, strict=True)])
        d_weights = [d for layer in reversed(d_layers) for d in layer]
        return None, None, (d_first + d_second).to(ctx.dtype), *d_weights


def undone(branch: Any, p: Any, stream: Any, out: Any, d_out: Any, d_stream: Any, dtype: Any) -> Any:
    """Subtract a branch of `stream` from `out`; add its gradient to `d_stream`, and return that of its weights."""
    weights = [leaf for _, leaf in tree.leaves(p)]
    trained = [leaf for leaf in weights if leaf.requires_grad]
    with torch.enable_grad():
        stream = stream.to(dtype).detach().requires_grad_()
        value = branch(p, stream)
    d_x, *d_trained = torch.autograd.grad(value, [stream, *trained], d_out.to(value.dtype), allow_unused=True)
    gradients = iter(d_trained)
    return out - value.detach(), d_stream + d_x, [next(gradients) if leaf.requires_grad else None for leaf in weights]


def added(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def stack(parts: Parts, ps: Any, x_BTD: Any) -> Any:
    """Apply all layers to two streams, keeping their last states; return the mean of both."""
    weights: Iterator[Any] = (leaf for _, leaf in tree.leaves(ps))
    return Reversible.apply(parts, ps, x_BTD, *weights)
