"""The cut loss as one `torch.autograd.Function`.

One buffer holds every tile in turn, and in float32 products are added to the gradients in place. In 16 bit they are
16-bit products, as in plain code, added to float32 sums.

The 1 of a target is subtracted from its probability before the products only where that is more than a half: see
`fused_loss`. Else its row of the weight, and of the weight's gradient, is subtracted after all tiles.

Of each row the largest logit and the sum of exponentials below it are kept, not their log-sum-exp l: exp(z - l) would
round a difference that is larger by log V / 2 or so, and with it every probability.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from harness import IGNORED, Objective, alike
from strategies.loss.fused_loss import HALF

PLAIN = Objective()


def cut_loss(x_BTD: Tensor, w_VD: Tensor, y_BT: Tensor, rows: int, tile: int, objective: Objective = PLAIN) -> Tensor:
    """Return the mean loss of the logits `x @ w.T` against `y`, in float32 (float64 for float64 inputs).

    `x_BTD` is [..., D], `w_VD` [V, D], `y_BT` [...]. The mean is over targets other than -100, NaN if there are none.
    Under autocast the products are in its type.
    """
    x_nD, y_n = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
    device = x_BTD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_nD, w_VD = x_nD.to(dtype), w_VD.to(dtype)
    with torch.autocast(device, enabled=False):
        return _CutLoss.apply(x_nD, w_VD, y_n, rows, tile, objective)


class _CutLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, w_VD: Tensor, y_n: Tensor, rows: int, tile: int, objective: Objective
    ) -> Tensor:
        top_n, total_n, picked_n, mean_n = _statistics(x_nD, w_VD, y_n, rows, tile, objective)
        aimed_n = picked_n + objective.label_smoothing * (mean_n - picked_n)
        lse_n = top_n + total_n.log()
        kept_n = y_n != IGNORED
        count = kept_n.sum()
        apart = x_nD.dtype == w_VD.dtype == top_n.dtype and not objective.soft_cap
        sure_n = (picked_n - top_n).exp() > HALF * total_n if apart else torch.ones_like(kept_n)
        ctx.save_for_backward(x_nD, w_VD, y_n, top_n, total_n, count, sure_n)
        ctx.settings = rows, tile, objective
        losses_n = lse_n - aimed_n
        if objective.z_loss:
            losses_n += objective.z_loss * lse_n.square()
        return torch.where(kept_n, losses_n, 0).sum() / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: a gradient without a graph would pass for a constant
            raise RuntimeError("cut_loss: this loss has no second derivative: call backward without create_graph=True.")
        x_nD, w_VD, y_n, top_n, total_n, count, sure_n = ctx.saved_tensors
        rows, tile, objective = ctx.settings
        smoothing, weight, cap = objective.label_smoothing, objective.z_loss, objective.soft_cap
        dtype, wide = x_nD.dtype, top_n.dtype
        factor_n = (y_n != IGNORED) * (upstream / count.clamp(min=1)).to(wide) / total_n
        needs_x, needs_w = ctx.needs_input_grad[:2]
        dx_nD = torch.zeros(x_nD.shape, dtype=wide, device=x_nD.device) if needs_x else None
        dw_VD = torch.zeros_like(w_VD) if needs_w else None
        room, slopes = _room(x_nD, w_VD, rows, tile), _room(x_nD, w_VD, rows if cap else 0, tile)
        for first in steps(len(w_VD), tile):
            w_tD = w_VD[first : first + tile]
            dw_tD = None if dw_VD is None else dw_VD[first : first + tile]
            in_place = dw_tD is None or dtype == wide
            sum_tD = dw_tD if in_place else torch.zeros(w_tD.shape, dtype=wide, device=w_VD.device)
            for row in steps(len(x_nD), rows):
                chunk = slice(row, row + rows)
                x_CD, top_C1, total_C = x_nD[chunk], top_n[chunk, None], total_n[chunk]
                g_Ct = _logits(x_CD, w_tD, cap, room)
                if cap:
                    slope_Ct = torch.div(g_Ct, cap, out=_shaped(slopes, *g_Ct.shape)).square_().neg_().add_(1)
                g_Ct.sub_(top_C1).exp_()  # gradients times `total`, up to the last factor
                if weight:
                    g_Ct.mul_(1 + 2 * weight * (top_C1 + total_C[:, None].log()))
                inside_C, at_C = _within(y_n[chunk], first, len(w_tD))
                first_C = inside_C & sure_n[chunk]
                # The number last: with a truth value alone it would be rounded to float32.
                g_Ct.scatter_add_(1, at_C[:, None], (first_C * total_C * (smoothing - 1))[:, None])
                if smoothing:
                    g_Ct.sub_(total_C[:, None] * (smoothing / len(w_VD)))
                if cap:
                    g_Ct.mul_(slope_Ct)
                g_Ct = g_Ct.mul_(factor_n[chunk, None]).to(dtype)
                if dx_nD is not None:
                    _add_product_(dx_nD[chunk], g_Ct, w_tD)
                if sum_tD is not None:
                    _add_product_(sum_tD, g_Ct.T, x_CD)
            if dw_tD is not None and sum_tD is not None and not in_place:
                dw_tD.copy_(sum_tD)
        if dtype == wide:
            rest_n1 = (~sure_n * total_n * factor_n * (1 - smoothing))[:, None]
            _less_targets_(dw_VD, dx_nD, x_nD, w_VD, y_n, rest_n1, rows)
        return None if dx_nD is None else dx_nD.to(dtype), dw_VD, None, None, None, None


def steps(size: int, step: int) -> Iterable[int]:
    """Number the first of so many rows of a size; all take the same, but for a shorter last."""
    return alike(range(0, size, step), lambda first: min(step, size - first))


def _less_targets_(
    dw_VD: Tensor | None, dx_nD: Tensor | None, x_nD: Tensor, w_VD: Tensor, y_n: Tensor, rest_n1: Tensor, rows: int
) -> None:
    """Subtract from the gradients, chunk by chunk, what the targets give whose 1 was not subtracted before."""
    for row in steps(len(x_nD), rows):
        chunk = slice(row, row + rows)
        at_C = y_n[chunk].clamp(min=0)
        if dx_nD is not None:
            dx_nD[chunk].addcmul_(rest_n1[chunk], w_VD[at_C], value=-1)
        if dw_VD is not None:
            dw_VD.index_add_(0, at_C, x_nD[chunk] * rest_n1[chunk], alpha=-1)


def _statistics(
    x_nD: Tensor, w_VD: Tensor, y_n: Tensor, rows: int, tile: int, objective: Objective
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each row [n] its largest logit, the sum of exponentials of all less that, its target's logit and,
    where targets are smoothed, the mean of all.
    """
    smoothing, room = objective.label_smoothing, _room(x_nD, w_VD, rows, tile)
    top, total, picked, mean = [], [], [], []
    for row in range(0, len(x_nD), rows):
        x_CD, y_C = x_nD[row : row + rows], y_n[row : row + rows]
        top_C = torch.full((len(x_CD),), -torch.inf, dtype=room.dtype, device=x_nD.device)
        total_C, picked_C, mean_C = torch.zeros_like(top_C), torch.zeros_like(top_C), torch.zeros_like(top_C)
        for first in steps(len(w_VD), tile):
            z_Ct = _logits(x_CD, w_VD[first : first + tile], objective.soft_cap, room)
            inside_C, at_C = _within(y_C, first, z_Ct.shape[1])
            picked_C = torch.where(inside_C, z_Ct.gather(1, at_C[:, None])[:, 0], picked_C)
            if smoothing:
                mean_C += z_Ct.sum(1) / len(w_VD)
            higher_C = torch.maximum(top_C, z_Ct.amax(1))
            total_C = total_C * (top_C - higher_C).exp() + z_Ct.sub_(higher_C[:, None]).exp_().sum(1)
            top_C = higher_C
        top.append(top_C)
        total.append(total_C)
        picked.append(picked_C)
        mean.append(mean_C)
    return torch.cat(top), torch.cat(total), torch.cat(picked), torch.cat(mean)


def _room(x_nD: Tensor, w_VD: Tensor, rows: int, tile: int) -> Tensor:
    """Allocate a tile, in float32 at the least."""
    size = min(rows, len(x_nD)) * min(tile, len(w_VD))
    return torch.empty(size, dtype=torch.promote_types(x_nD.dtype, torch.float32), device=x_nD.device)


def _shaped(room: Tensor, rows: int, columns: int) -> Tensor:
    return room[: rows * columns].view(rows, columns)


def _logits(x_CD: Tensor, w_tD: Tensor, cap: float, room: Tensor) -> Tensor:
    """Multiply a tile, and bend it to stay within `cap` where there is one."""
    z_Ct = _shaped(room, len(x_CD), len(w_tD))
    if x_CD.dtype == room.dtype:
        torch.mm(x_CD, w_tD.T, out=z_Ct)
    else:
        z_Ct.copy_(x_CD @ w_tD.T)
    return z_Ct.div_(cap).tanh_().mul_(cap) if cap else z_Ct


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _within(y_C: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which targets lie in a tile, and where in it; those outside point at an end of it."""
    at_C = y_C - first
    return (at_C >= 0) & (at_C < size), at_C.clamp(0, size - 1)
