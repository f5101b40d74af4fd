"""Products with the weights of layers through a kernel that is written out, forward and backward."""

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch._subclasses import FakeTensor

from harness import Parts

KNOWN = (torch.float32, torch.float64)


def with_products(parts: Parts, name: str) -> Parts:
    """Return parts whose layers multiply by the kernel of this name."""

    def linear(parts: Parts, p: Any, weight: str, x: Any) -> Any:
        bias = p.get(f"b{weight}")
        y = _Product.apply(name, x, p[weight])
        return y if bias is None else y + bias

    return replace(parts, linear=linear)


class _Product(torch.autograd.Function):
    """x_NK @ w_KM and its gradients, the rows N in any number of dimensions."""

    @staticmethod
    def forward(ctx: Any, name: str, x: torch.Tensor, w_KM: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        ctx.size = x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, w_KM if ctx.needs_input_grad[1] else None)
        return product(name, x.flatten(0, -2), w_KM).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w_KM = ctx.saved_tensors
        g_NM = grads[0].flatten(0, -2)
        dx = None if w_KM is None else product(ctx.name, g_NM, w_KM.T).unflatten(0, ctx.size[:-1])
        return None, dx, None if x is None else product(ctx.name, x.flatten(0, -2).T, g_NM)


def product(name: str, x_NK: torch.Tensor, w_KM: torch.Tensor) -> torch.Tensor:
    """Multiply two matrices by a kernel; raise ValueError for a type that it does not know."""
    if x_NK.dtype not in KNOWN or w_KM.dtype != x_NK.dtype:
        raise ValueError(f"{name}_product: it multiplies float32 or float64, not {x_NK.dtype} with {w_KM.dtype}")
    y_NM = x_NK.new_empty((x_NK.shape[0], w_KM.shape[1]))
    x_NK, w_KM = x_NK.contiguous(), w_KM.contiguous()
    if not isinstance(x_NK, FakeTensor):  # a prediction asks for the sizes alone
        _kernel(name, x_NK.device.type)(x_NK, w_KM, y_NM)
    return y_NM


@cache
def _kernel(name: str, device: str) -> Any:
    """Return the kernel (x_NK, w_KM, y_NM) for a device, which fills y."""
    module = import_module("strategies.products." + ("_cpu" if device == "cpu" else "_gpu"))
    return getattr(module, name)
