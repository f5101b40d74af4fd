"""The cut loss as one `torch.autograd.Function`."""

from typing import Any

import torch
from torch import Tensor

IGNORED = -100


def cut_loss(x_BTD: Tensor, w_VD: Tensor, y_BT: Tensor, rows: int, tile: int) -> Tensor:
    """Return the mean cross-entropy of `x @ w.T` against `y`, in float32 (float64 for float64 inputs).

    `x_BTD` is [..., D], `w_VD` [V, D], `y_BT` [...]. The mean is over targets other than -100, NaN if there are none.
    """
    return _CutLoss.apply(x_BTD.reshape(-1, x_BTD.shape[-1]), w_VD, y_BT.reshape(-1), rows, tile)


class _CutLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, w_VD: Tensor, y_n: Tensor, rows: int, tile: int) -> Tensor:
        lse_n, picked_n = _statistics(x_nD, w_VD, y_n, rows, tile)
        kept_n = y_n != IGNORED
        count = kept_n.sum()
        ctx.save_for_backward(x_nD, w_VD, y_n, lse_n, count)
        ctx.sizes = rows, tile
        return torch.where(kept_n, lse_n - picked_n, 0).sum() / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_nD, w_VD, y_n, lse_n, count = ctx.saved_tensors
        rows, tile = ctx.sizes
        wide = lse_n.dtype
        factor_n = (y_n != IGNORED) * (upstream / count.clamp(min=1)).to(wide)
        dx_nD = torch.zeros(x_nD.shape, dtype=wide, device=x_nD.device)
        dw_VD = torch.empty_like(w_VD)
        for first in range(0, len(w_VD), tile):
            w_tD = w_VD[first : first + tile]
            dw_tD = torch.zeros(w_tD.shape, dtype=wide, device=w_VD.device)
            for row in range(0, len(x_nD), rows):
                chunk = slice(row, row + rows)
                x_CD = x_nD[chunk]
                g_Ct = (x_CD @ w_tD.T).to(wide).sub_(lse_n[chunk, None]).exp_()
                inside_C, at_C = _within(y_n[chunk], first, len(w_tD))
                g_Ct.scatter_add_(1, at_C[:, None], -inside_C[:, None].to(wide))
                g_Ct = g_Ct.mul_(factor_n[chunk, None]).to(x_nD.dtype)
                dx_nD[chunk] += g_Ct @ w_tD
                dw_tD += g_Ct.T @ x_CD
            dw_VD[first : first + tile] = dw_tD
        return dx_nD.to(x_nD.dtype), dw_VD, None, None, None


def _statistics(x_nD: Tensor, w_VD: Tensor, y_n: Tensor, rows: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp [n] of each row of logits, and the logit [n] of its target."""
    wide = torch.promote_types(x_nD.dtype, torch.float32)
    lse, picked = [], []
    for row in range(0, len(x_nD), rows):
        x_CD, y_C = x_nD[row : row + rows], y_n[row : row + rows]
        top_C = torch.full((len(x_CD),), -torch.inf, dtype=wide, device=x_nD.device)
        total_C, picked_C = torch.zeros_like(top_C), torch.zeros_like(top_C)
        for first in range(0, len(w_VD), tile):
            z_Ct = (x_CD @ w_VD[first : first + tile].T).to(wide)
            inside_C, at_C = _within(y_C, first, z_Ct.shape[1])
            picked_C = torch.where(inside_C, z_Ct.gather(1, at_C[:, None])[:, 0], picked_C)
            higher_C = torch.maximum(top_C, z_Ct.amax(1))
            total_C = total_C * (top_C - higher_C).exp() + z_Ct.sub_(higher_C[:, None]).exp_().sum(1)
            top_C = higher_C
        lse.append(top_C + total_C.log())
        picked.append(picked_C)
    return torch.cat(lse), torch.cat(picked)


def _within(y_C: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Say which targets lie in a tile, and where in it; those outside point at an end of it."""
    at_C = y_C - first
    return (at_C >= 0) & (at_C < size), at_C.clamp(0, size - 1)
