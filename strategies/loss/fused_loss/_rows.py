"""The fused loss on a GPU: one kernel between three products of a library, about 2,048 rows at a time.

A product with a 16-bit weight is bound by arithmetic from some 300 rows on, but each chunk also reads and writes the
weight's gradient: at 2,048 rows that is less than a tenth of its time. That gradient is summed in float32, or in
bfloat16 for weights of bfloat16 where there are at most `ROUNDINGS` chunks. In float16 a sum that is not scaled yet may
overflow: 65,504 are 8,000 rows of inputs of 8.

What Triton and cuBLAS do stands here as operators with a form for fake tensors, so that the step can be predicted,
counted and compiled where there is neither.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from harness import Objective, alike
from strategies.loss.fused_loss import HALF, TILE

DEVICE = "cuda"
ROWS = 2048
ROUNDINGS = 8
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("harness::differentiate_rows_", mutates_args=("z_CV",))
def differentiate_(
    z_CV: Tensor, y_C: Tensor, ignored: int, cap: float, smoothing: float, z_loss: float, apart: bool
) -> Tensor:
    """Turn logits in place into the gradients of their losses; return the loss and the rest of each row [C, 2]."""
    from strategies.loss.fused_loss import _kernel

    seen_C2 = torch.empty(len(z_CV), 2, device=z_CV.device)
    with torch.cuda.device_of(z_CV):  # Triton launches on the current device; on the CPU this does nothing
        _kernel.launch(z_CV, y_C, seen_C2, ignored, cap, smoothing, z_loss, HALF, apart)
    return seen_C2


@differentiate_.register_fake
def _(z_CV: Tensor, y_C: Tensor, ignored: int, cap: float, smoothing: float, z_loss: float, apart: bool) -> Tensor:
    return torch.empty(len(z_CV), 2, device=z_CV.device)


@torch.library.custom_op("harness::add_product_", mutates_args=("sum_VD",))
def add_product_(sum_VD: Tensor, z_CV: Tensor, x_CD: Tensor) -> None:
    """Add the product z.T x of 16-bit matrices to a float32 sum, rounding nothing to 16 bits."""
    if z_CV.is_cuda:
        torch.addmm(sum_VD, z_CV.t(), x_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:  # a CPU has no such product
        sum_VD.addmm_(z_CV.t().to(sum_VD.dtype), x_CD.to(sum_VD.dtype))


@add_product_.register_fake
def _(sum_VD: Tensor, z_CV: Tensor, x_CD: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.harness.add_product_)
def _product_flops(sum_VD: Any, z_CV: Any, x_CD: Any, *_: Any, **__: Any) -> int:
    return 2 * z_CV[0] * z_CV[1] * x_CD[1]


def takes(x_nD: Tensor, dtype: torch.dtype) -> bool:
    """Check whether the kernel takes logits of this type where `x_nD` lies: on a GPU, or on one that is supposed."""
    if x_nD.device.type == "cpu" or dtype not in TYPES:
        return False
    return x_nD.device.type != "cuda" or isinstance(x_nD, torch._subclasses.FakeTensor) or has_triton()


def has_triton() -> bool:
    """Return whether Triton is installed, as it is with torch's CUDA builds for Linux."""
    return find_spec("triton") is not None


def loss_and_gradients(
    x_nD: Tensor,
    w_VD: Tensor,
    y_n: Tensor,
    chunk: int,
    ignore_index: int,
    objective: Objective,
    needs: tuple[bool, bool],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | list[Tensor] | None]:
    """Return the loss, the number of rows in it, and the gradients of the *sum*: dx, dw (or its tiles)."""
    n, V = len(x_nD), len(w_VD)
    chunk = min(chunk or ROWS, max(n, 1))
    w, y_n = w_VD.to(dtype), y_n.long().contiguous()  # the kernel reads one target after the other
    settings = ignore_index, objective.soft_cap, objective.label_smoothing, objective.z_loss
    apart = dtype == w_VD.dtype == torch.float32 and not objective.soft_cap
    dx_nD = torch.empty_like(x_nD, memory_format=torch.contiguous_format) if needs[0] else None
    sums = weight_sums(w_VD, dtype, -(-n // chunk)) if needs[1] else []
    z_CV = torch.empty(chunk, V, device=x_nD.device, dtype=dtype)
    seen_n2 = torch.empty(n, 2, device=x_nD.device)

    for start in alike(range(0, n, chunk), lambda start: min(chunk, n - start)):
        rows = slice(start, start + chunk)
        x_CD = x_nD[rows].to(dtype)
        z = z_CV[: len(x_CD)]
        torch.mm(x_CD, w.t(), out=z)
        seen_n2[rows] = differentiate_(z, y_n[rows], *settings, apart)
        if dx_nD is not None:
            dx_nD[rows] = z @ w
        for sum_, z_tile in zip(sums, z.split(len(sums[0]), 1) if sums else (), strict=True):
            if sum_.dtype == dtype:
                sum_.addmm_(z_tile.t(), x_CD)
            else:
                add_product_(sum_, z_tile, x_CD)
    if apart:
        subtract_rest_(dx_nD, sums, seen_n2[:, 1:], x_nD, w, torch.where(y_n == ignore_index, 0, y_n))
    count = (y_n != ignore_index).sum().to(torch.float32)
    whole = sums[0] if len(sums) == 1 else sums
    return seen_n2[:, 0].sum() / count, count, dx_nD, whole if sums else None


def weight_sums(w_VD: Tensor, dtype: torch.dtype, chunks: int) -> list[Tensor]:
    """Allocate the sum of the weight's gradient: whole in the weight's type, or float32 tiles to be freed in turn."""
    if w_VD.dtype == torch.float32 or (w_VD.dtype == dtype == torch.bfloat16 and chunks <= ROUNDINGS):
        return [torch.zeros_like(w_VD, memory_format=torch.contiguous_format)]
    return [torch.zeros(tile.shape, device=tile.device) for tile in w_VD.split(TILE)]


def subtract_rest_(
    dx_nD: Tensor | None, sums: list[Tensor], rest_n1: Tensor, x_nD: Tensor, w_VD: Tensor, target_n: Tensor
) -> None:
    """Subtract what was left at each target: the row of the weight, and that of the weight's gradient."""
    for at in range(0, len(x_nD), TILE):
        rows = slice(at, at + TILE)
        if dx_nD is not None:
            dx_nD[rows].addcmul_(rest_n1[rows], w_VD[target_n[rows]], value=-1)
        if sums:
            sums[0].index_add_(0, target_n[rows], x_nD[rows].to(sums[0].dtype) * rest_n1[rows], alpha=-1)
