"""Products of activations with weights whose backward pass reads rounded activations."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from strategies.activations.int8_activations import STEPS

PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class RoundedProducts(TorchFunctionMode):
    """Replace products with weights that are trained, `x @ w` and `linear(x, w)`; round an input once."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group
        self.rounded: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_linear = func is torch.nn.functional.linear  # its weights are [out, in]
        if not (is_linear or func in PRODUCTS) or kwargs or not self._is_of_weight(*args[:2]):
            return func(*args, **(kwargs or {}))
        x, w, *bias = args
        if id(x) not in self.rounded:
            self.rounded[id(x)] = (x, *narrow(x.detach(), self.group))  # x itself, or its number could be another's
        _, codes, scales = self.rounded[id(x)]
        y = _Product.apply(x, w.T if is_linear else w, codes, scales)
        return y + bias[0] if bias and bias[0] is not None else y

    def __exit__(self, *error: Any) -> Any:
        self.rounded.clear()
        return super().__exit__(*error)

    @staticmethod
    def _is_of_weight(x: Any, w: Any) -> bool:
        trained = torch.is_grad_enabled() and isinstance(w, torch.Tensor) and w.dim() == 2 and w.requires_grad
        return trained and x.is_floating_point()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(w, codes, scales)
        ctx.like = x.shape, x.dtype
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        w, codes, scales = ctx.saved_tensors
        shape, dtype = ctx.like
        d_x = grad @ w.mT if ctx.needs_input_grad[0] else None
        x = widened(codes, scales, shape).to(dtype)
        return d_x, x.flatten(0, -2).mT @ grad.flatten(0, -2), None, None


def narrow(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round to codes [groups, group] of int8, and a scale for each group; the last group is filled up with zeros."""
    numbers = x.reshape(-1)
    rest = -len(numbers) % group
    numbers = (torch.nn.functional.pad(numbers, (0, rest)) if rest else numbers).view(-1, group)
    scales = numbers.abs().amax(1, keepdim=True).to(torch.float32) / STEPS
    scales.clamp_(min=torch.finfo(torch.float32).tiny)
    return (numbers / scales).round_().to(torch.int8), scales


def widened(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the numbers that the codes stand for, in float32."""
    return (codes * scales).view(-1)[: shape.numel()].view(shape)
