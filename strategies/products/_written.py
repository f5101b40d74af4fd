"""Products of the feed part through a kernel that is written out: `x @ w` is caught while the part runs."""

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from harness import Parts

CAUGHT = {torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul}
KNOWN = (torch.float32, torch.float64)


def with_products(parts: Parts, name: str) -> Parts:
    """Return parts whose feed part multiplies by the kernel of this name."""
    inner = parts.feed

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        with _Caught(name):
            return inner(parts, p, x_BTD)

    return replace(parts, feed=feed)


class _Caught(TorchFunctionMode):
    """Take products of two tensors, and leave all else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CAUGHT:
            return _Product.apply(self.name, *args)
        return func(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """x_NK @ w_KM and its gradients, the rows N in any number of dimensions."""

    @staticmethod
    def forward(ctx: Any, name: str, x: torch.Tensor, w_KM: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        ctx.save_for_backward(x, w_KM)
        return product(name, x.flatten(0, -2), w_KM).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w_KM = ctx.saved_tensors
        x_NK, g_NM = x.flatten(0, -2), grads[0].flatten(0, -2)
        dx_NK = product(ctx.name, g_NM, w_KM.T)
        return None, dx_NK.unflatten(0, x.shape[:-1]), product(ctx.name, x_NK.T, g_NM)


def product(name: str, x_NK: torch.Tensor, w_KM: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices by a kernel; raise ValueError for a type that it does not know."""
    if x_NK.dtype not in KNOWN or w_KM.dtype != x_NK.dtype:
        raise ValueError(f"{name}_product: it multiplies float32 or float64, not {x_NK.dtype} with {w_KM.dtype}")
    y_NM = x_NK.new_empty((x_NK.shape[0], w_KM.shape[1]))
    if not isinstance(x_NK, FakeTensor):  # a prediction asks for the sizes alone
        _kernel(name, x_NK.device.type)(x_NK.contiguous(), w_KM.contiguous(), y_NM)
    return y_NM


@cache
def _kernel(name: str, device: str) -> Any:
    """Return the kernel (x_NK, w_KM, y_NM) for a device, which fills y."""
    module = import_module("strategies.products." + ("_cpu" if device == "cpu" else "_gpu"))
    return getattr(module, name)
