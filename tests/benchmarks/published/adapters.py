"""Adapters and 4-bit weights as the libraries of the published runs compute them: PEFT and bitsandbytes.

Only what their modules take and give back is rebuilt, operator by operator; no value is computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

BLOCK, NESTED = 64, 256
"""Weights that share a scale in NF4 (Dettmers et al., 2023, arXiv:2305.14314), and scales that share one themselves."""

SCALING = 2.0
"""What an adapter's output is multiplied by: whatever it is, it takes the same memory."""


class Placed(nn.Parameter):
    """A parameter that lies on the device already."""


class Linear4bit(nn.Module):
    """A frozen linear layer in NF4: 4 bits a weight, and a scale for each block of 64."""

    def __init__(self, linear: nn.Linear, compute: torch.dtype, nested: bool) -> None:
        """Quantise as bitsandbytes does: the wide weight lies on the device meanwhile."""
        super().__init__()
        wide = torch.empty_like(linear.weight, requires_grad=False)
        self.size, self.dtype, self.compute, self.nested = wide.shape, wide.dtype, compute, nested
        self.code = torch.empty(16, device=wide.device)
        blocks = -(-wide.numel() // BLOCK)
        scales = torch.empty(blocks, device=wide.device)
        packed = torch.empty(-(-wide.numel() // 2), 1, dtype=torch.uint8, device=wide.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        if nested:
            self.offset = scales.mean()
            centred = scales - self.offset
            self.nested_code = torch.empty(256, device=wide.device)
            self.nested_scales = torch.empty(-(-blocks // NESTED), device=wide.device)
            scales = torch.empty(blocks, dtype=torch.uint8, device=wide.device)
            del centred
        self.scales = scales
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)

    def wide_weight(self) -> torch.Tensor:
        """Take what dequantising takes; return the wide weight."""
        if self.nested:
            scales = torch.empty(self.scales.shape, device=self.scales.device)
            scales += self.offset
        return torch.empty(self.size, dtype=self.dtype, device=self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        bias = None if self.bias is None else self.bias.to(self.compute)
        y: torch.Tensor = _Multiply4bit.apply(x.to(self.compute), self, bias)
        return y.to(dtype)


class _Multiply4bit(torch.autograd.Function):
    """Multiply with a 4-bit weight, which is made wide in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Linear4bit, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.wide_weight().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0]
        return torch.matmul(grad, ctx.layer.wide_weight().to(grad.dtype)), None, None


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it (LoRA), as PEFT computes it."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int], rank: int, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        dtype = base.weight.dtype if isinstance(base, nn.Linear | Conv1D) else torch.float32
        device = next(base.parameters()).device
        self.a = nn.Linear(sizes[0], rank, bias=False, device=device, dtype=dtype)
        self.b = nn.Linear(rank, sizes[1], bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x)
        dtype = result.dtype
        if torch.is_autocast_enabled("cuda"):
            result = result.clone() if isinstance(self.base, Linear4bit) else result
            return result + self.b(self.a(self.dropout(x))) * SCALING
        if isinstance(self.base, Linear4bit):
            result = result.clone()
            output = self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * SCALING
            return result + output.to(dtype)
        result = result + self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * SCALING
        return result.to(dtype)


def prepare(model: nn.Module) -> None:
    """Widen what is not in 4 bits to float32, as `prepare_model_for_kbit_training` does."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)


def adapt(model: nn.Module, targets: Sequence[str] | str, rank: int, dropout: float) -> int:
    """Freeze a model and put adapters beside its target layers, whose weights are float32 in the end; count them.

    `all-linear` are all linear layers but the head.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    names = [targets] if isinstance(targets, str) else targets
    for parent, name, layer in _linears(model):
        if name in names or (targets == "all-linear" and name != "lm_head"):
            setattr(parent, name, Adapted(layer, _sizes(layer), rank, dropout))
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    for module in adapted:
        for linear in (module.a, module.b):
            linear.weight.data = linear.weight.data.to(torch.float32)
    return len(adapted)


def _sizes(layer: Any) -> tuple[int, int]:
    """Return the inputs and outputs of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    rows, columns = layer.size if isinstance(layer, Linear4bit) else layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if isinstance(child, nn.Linear | Linear4bit | Conv1D)
    ]
