"""The losses of all tokens from rows of the classifier that are spread over the ranks, as one `autograd.Function`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness import IGNORED, Objective
from strategies.sharding._torch import all_reduce


def rows_of(vocabulary: int) -> int:
    """Count the rows of a rank; the last one's are filled up."""
    return -(-vocabulary // dist.get_world_size())


def vocabulary_losses(
    x_nD: Tensor, w_rD: Tensor, y_n: Tensor, vocabulary: int, chunk: int, objective: Objective
) -> Tensor:
    """Return the loss [n] of each token, 0 where it is ignored; the same on every rank, which holds `w` by rows.

    The gradient that comes back is summed over the ranks, as each may use the losses of some tokens alone.
    """
    return _Losses.apply(x_nD, w_rD, y_n, vocabulary, chunk, objective)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, w_rD: Tensor, y_n: Tensor, vocabulary: int, chunk: int, objective: Objective
    ) -> Tensor:
        first = dist.get_rank() * rows_of(vocabulary)
        w_vD = w_rD[: max(0, min(len(w_rD), vocabulary - first))]
        smoothing = objective.label_smoothing
        tops, totals, losses = [], [], []
        for x_CD, y_C in zip(x_nD.split(chunk), y_n.split(chunk), strict=True):
            z_Cv = _logits(x_CD, w_vD, objective.soft_cap)
            top_C = z_Cv.amax(1) if len(w_vD) else z_Cv.new_full((len(x_CD),), -torch.inf)
            top_C = all_reduce(top_C, largest=True)
            inside_C, at_C1 = _within(y_C, first, len(w_vD))
            picked_C = z_Cv.gather(1, at_C1)[:, 0] * inside_C if len(w_vD) else torch.zeros_like(top_C)
            sums = torch.stack([(z_Cv - top_C[:, None]).exp_().sum(1), picked_C, z_Cv.sum(1) / vocabulary])
            total_C, picked_C, mean_C = all_reduce(sums)
            lse_C = top_C + total_C.log()
            losses.append(
                torch.where(
                    y_C != IGNORED,
                    lse_C - picked_C - smoothing * (mean_C - picked_C) + objective.z_loss * lse_C.square(),
                    0,
                )
            )
            tops.append(top_C)
            totals.append(total_C)
        ctx.save_for_backward(x_nD, w_rD, y_n, torch.cat(tops), torch.cat(totals))
        ctx.settings = vocabulary, chunk, objective
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, upstream_n: Tensor) -> tuple[Tensor | None, ...]:
        x_nD, w_rD, y_n, top_n, total_n = ctx.saved_tensors
        vocabulary, chunk, objective = ctx.settings
        smoothing, weight, cap = objective.label_smoothing, objective.z_loss, objective.soft_cap
        first = dist.get_rank() * rows_of(vocabulary)
        w_vD = w_rD[: max(0, min(len(w_rD), vocabulary - first))]
        upstream_n = all_reduce(upstream_n.clone()) * (y_n != IGNORED)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        dx_nD = torch.empty_like(x_nD) if needs_x else None
        dw_rD = torch.zeros(w_rD.shape, dtype=top_n.dtype, device=w_rD.device) if needs_w else None
        for start in range(0, len(x_nD), chunk):
            rows = slice(start, start + chunk)
            x_CD, up_C, total_C = x_nD[rows], upstream_n[rows], total_n[rows]
            g_Cv = _logits(x_CD, w_vD, cap)
            slope_Cv = 1 - (g_Cv / cap).square() if cap else None
            g_Cv.sub_(top_n[rows, None]).exp_()
            factor_C = up_C / total_C
            if weight:
                factor_C = factor_C * (1 + 2 * weight * (top_n[rows] + total_C.log()))
            g_Cv.mul_(factor_C[:, None])
            inside_C, at_C1 = _within(y_n[rows], first, len(w_vD))
            if len(w_vD):
                g_Cv.scatter_add_(1, at_C1, (inside_C * up_C * (smoothing - 1))[:, None])
            if smoothing:
                g_Cv.sub_((smoothing / vocabulary) * up_C[:, None])
            if slope_Cv is not None:
                g_Cv.mul_(slope_Cv)
            narrow_Cv = g_Cv.to(x_nD.dtype)
            if dx_nD is not None:
                dx_nD[rows] = narrow_Cv @ w_vD
            if dw_rD is not None:
                dw_rD[: len(w_vD)] += narrow_Cv.T @ x_CD
        return dx_nD, None if dw_rD is None else dw_rD.to(w_rD.dtype), None, None, None, None


def _logits(x_CD: Tensor, w_vD: Tensor, cap: float) -> Tensor:
    z_Cv = (x_CD @ w_vD.T).to(torch.promote_types(x_CD.dtype, torch.float32))
    return z_Cv.div_(cap).tanh_().mul_(cap) if cap else z_Cv


def _within(y_C: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which targets are among the rows of this rank, and where; those of others point at an end of them."""
    at_C = y_C - first
    return (at_C >= 0) & (at_C < size), at_C.clamp(0, max(0, size - 1))[:, None]
