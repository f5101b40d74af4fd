"""The fused loss as one `torch.autograd.Function`; on a GPU its rows go through a kernel, see `_rows`.

What would surprise:
* No step of it reads a value back to the host: it runs under `FakeTensorMode` and never stalls a device.
* In 16 bit the logits are a 16-bit product, as in plain code, but the softmax is float32: a quarter of the
  chunk at a time is widened into a stage, and narrowed back only after the target's 1 was subtracted.
  (Narrowed before, a confident row's gradient p - 1 would be mostly rounding error.)
* The 1 of a target is not subtracted from its probability before the products, unless that is more than a half: beside
  it the small probabilities would be rounded away within each sum. The row of the weight, and that of the weight's
  gradient, are subtracted apart, the latter after all chunks. Where a row is confident it is the other way round: the
  difference is small, and must be formed first.
* The CPU has no 16-bit product with a float32 result, so each chunk's share of the weight gradient is a
  16-bit product of one vocabulary tile, added to a float32 sum. The sum is kept as separate tiles, each
  narrowed and freed in turn by the backward pass: the wide and the narrow gradient are never whole side by
  side.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness import IGNORED, Objective, alike
from strategies.loss.fused_loss import HALF, TILE, _rows

STAGES = 4  # parts of a chunk that needs another buffer, one at a time; many small ones would wait at more barriers
PLAIN = Objective()


def chunk_rows(n: int, V: int, gradient_bytes: int, logit_bytes: int) -> int:
    """Choose the rows of logits alive at once: a quarter of the gradients' bytes, 64 to 4096, at most n."""
    rows = gradient_bytes // 4 // (V * logit_bytes) // 64 * 64
    return min(max(64, min(rows, 4096)), max(n, 1))


def fused_loss(
    x_BTD: Tensor,
    w_VD: Tensor,
    y_BT: Tensor,
    chunk: int = 0,
    ignore_index: int = IGNORED,
    objective: Objective = PLAIN,
) -> Tensor:
    """Return the mean loss of the logits `x @ w.T` against `y`, in float32 (float64 for float64 inputs).

    `x_BTD` is [..., D], `w_VD` [V, D], `y_BT` [...] of any integer type. Under autocast the products are in
    its type; mixed input types are promoted. The mean is over targets other than `ignore_index`, NaN if there
    are none. `chunk` rows of logits are alive at once, 0 chooses. Raises ValueError for shapes that do not
    agree or a negative chunk; its backward pass raises RuntimeError the second time (graph retained or not)
    and under `create_graph=True`.
    """
    if w_VD.dim() != 2 or x_BTD.shape[-1] != w_VD.shape[1] or x_BTD.shape[:-1] != y_BT.shape:
        raise ValueError(
            f"fused_loss needs x [..., D], w [V, D] and y [...], got {tuple(x_BTD.shape)}, "
            f"{tuple(w_VD.shape)} and {tuple(y_BT.shape)}: "
            "pass hidden states and targets of equal leading shape."
        )
    if chunk < 0:
        raise ValueError(f"fused_loss: chunk is {chunk}, but must be a number of rows, or 0 to choose.")
    grad = torch.is_grad_enabled()  # needs_input_grad does not know about no_grad
    needs = grad and x_BTD.requires_grad, grad and w_VD.requires_grad
    return _FusedLoss.apply(x_BTD, w_VD, y_BT, chunk, ignore_index, objective, needs)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        w_VD: Tensor,
        y_BT: Tensor,
        chunk: int,
        ignore_index: int,
        objective: Objective,
        needs: tuple[bool, bool],
    ) -> Tensor:
        device = x_BTD.device.type
        dtype = torch.promote_types(x_BTD.dtype, w_VD.dtype)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        x_nD, y_n = x_BTD.reshape(-1, x_BTD.shape[-1]), y_BT.reshape(-1)
        compute = _rows.loss_and_gradients if _rows.takes(x_nD, dtype) else _loss_and_gradients
        with torch.autocast(device, enabled=False):
            loss, *ctx.gradients = compute(x_nD, w_VD, y_n, chunk, ignore_index, objective, needs, dtype)
        ctx.shapes = (x_BTD.shape, w_VD.shape, w_VD.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: a gradient without a graph would pass for a constant
            raise RuntimeError(
                "fused_loss: this loss has no second derivative, as its gradients are made in the forward "
                "pass: call backward without create_graph=True, or leave the loss as it was."
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "fused_loss: a second backward pass through the same loss is impossible, as the first one "
                "took its gradients: compute the loss again, or ask for all gradients in one pass."
            )
        (count, dx_nD, dw), ctx.gradients = ctx.gradients, None
        x_shape, w_shape, w_dtype = ctx.shapes
        factor = upstream / count.clamp(min=1)  # no target that counts: gradients of 0, as in plain code
        if dx_nD is not None:
            for rows in dx_nD.split(TILE):
                _scale_(rows, factor)
            dx_nD = dx_nD.view(x_shape)
        if isinstance(dw, list):
            tiles, dw = dw, torch.empty(w_shape, dtype=w_dtype, device=factor.device)
            for rows in dw.split(TILE):
                rows.copy_(tiles.pop(0).mul_(factor))
        elif dw is not None:
            for rows in dw.split(TILE):
                _scale_(rows, factor)
        return dx_nD, dw, None, None, None, None, None


def _loss_and_gradients(
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
    n, wide = len(x_nD), torch.promote_types(dtype, torch.float32)  # of the softmax and of every sum over rows
    w = w_VD.to(dtype)
    apart = dtype == w_VD.dtype == wide and not objective.soft_cap
    counts_n = y_n != ignore_index
    count = counts_n.sum().to(wide)
    target_n1 = torch.where(counts_n, y_n, 0).long().unsqueeze(1)
    counts_n1 = counts_n.unsqueeze(1).to(wide)

    dx_nD = torch.empty(x_nD.shape, dtype=x_nD.dtype, device=x_nD.device) if needs[0] else None
    dw = _weight_sum(w_VD, wide) if needs[1] else None
    chunk = min(chunk or _chosen_rows(x_nD, w_VD, dtype, wide, objective), max(n, 1))
    room = _room(chunk, w, wide, objective)
    loss_n1 = torch.empty(n, 1, device=x_nD.device, dtype=wide)
    rest_n1 = torch.zeros_like(loss_n1)

    for start in alike(range(0, n, chunk), lambda start: min(chunk, n - start)):
        rows = slice(start, start + chunk)
        x_CD = x_nD[rows].to(dtype)
        z = room.logits[: len(x_CD)]
        torch.mm(x_CD, w.t(), out=z)
        _by_stages_(z, target_n1[rows], counts_n1[rows], objective, room, apart, loss_n1[rows], rest_n1[rows])
        if dx_nD is not None:
            dx_nD[rows] = z @ w
            if apart:
                _rows.subtract_rest_(dx_nD[rows], [], rest_n1[rows], x_nD[rows], w, target_n1[rows, 0])
        if dw is not None:
            _add_product_(dw, z, x_CD)
    if apart and isinstance(dw, Tensor):
        _rows.subtract_rest_(None, [dw], rest_n1, x_nD, w, target_n1[:, 0])
    return loss_n1.sum() / count, count, dx_nD, dw


def _chosen_rows(x_nD: Tensor, w_VD: Tensor, dtype: torch.dtype, wide: torch.dtype, objective: Objective) -> int:
    """Choose the rows of a chunk by the bytes of both gradients, and of a row of logits with its stages."""
    stages = (dtype != wide) + (objective.soft_cap != 0)
    logit_bytes = dtype.itemsize + stages * wide.itemsize // STAGES
    gradient_bytes = x_nD.numel() * x_nD.dtype.itemsize + w_VD.numel() * wide.itemsize
    return chunk_rows(len(x_nD), len(w_VD), gradient_bytes, logit_bytes)


class _Room(NamedTuple):
    """Where a chunk is computed: its logits, and of `stage_rows` at a time those widened and the slopes of a cap.

    What is not needed has no rows.
    """

    logits: Tensor
    wide: Tensor
    slopes: Tensor
    stage_rows: int


def _room(chunk: int, w_VD: Tensor, wide: torch.dtype, objective: Objective) -> _Room:
    """Allocate the room for chunks of so many rows."""
    widens, capped = w_VD.dtype != wide, objective.soft_cap != 0
    stage_rows = -(-chunk // STAGES) if widens or capped else chunk

    def rows(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, len(w_VD), device=w_VD.device, dtype=dtype)

    return _Room(rows(chunk, w_VD.dtype), rows(stage_rows * widens, wide), rows(stage_rows * capped, wide), stage_rows)


def _weight_sum(w_VD: Tensor, wide: torch.dtype) -> Tensor | list[Tensor]:
    """Allocate the sum of the weight gradient: whole where it stays in its type, else in tiles to be freed in turn."""
    tiles = [w_VD] if w_VD.dtype == wide else w_VD.split(TILE)
    sums = [torch.zeros(*tile.shape, device=w_VD.device, dtype=wide) for tile in tiles]
    return sums[0] if w_VD.dtype == wide else sums


def _add_product_(dw: Tensor | list[Tensor], z: Tensor, x_CD: Tensor) -> None:
    """Add a chunk's share of the weight gradient, in 16 bit the product of one tile at a time."""
    if isinstance(dw, Tensor) and dw.dtype == z.dtype:
        dw.addmm_(z.t(), x_CD)
        return
    tiles = dw.split(TILE) if isinstance(dw, Tensor) else dw
    for rows, z_tile in zip(tiles, z.split(TILE, 1), strict=True):
        rows.add_(z_tile.t() @ x_CD)


def _by_stages_(
    z: Tensor,
    target_C1: Tensor,
    counts_C1: Tensor,
    objective: Objective,
    room: _Room,
    apart: bool,
    loss_C1: Tensor,
    rest_C1: Tensor,
) -> None:
    """Turn the logits of a chunk in place into the gradients of their losses; write both results of `_differentiated_`.

    Narrow logits are widened into a stage, and narrowed back from it.
    """
    narrow = z.dtype != room.wide.dtype
    for at in range(0, len(z), room.stage_rows):
        rows = slice(at, at + room.stage_rows)
        of_stage = z[rows]
        p = room.wide[: len(of_stage)].copy_(of_stage) if narrow else of_stage
        results = _differentiated_(p, target_C1[rows], counts_C1[rows], objective, room.slopes, apart)
        loss_C1[rows], rest_C1[rows] = results
        if narrow:
            of_stage.copy_(p)


def _differentiated_(
    z: Tensor, target_n1: Tensor, counts_n1: Tensor, objective: Objective, slopes: Tensor, apart: bool
) -> tuple[Tensor, Tensor]:
    """Turn logits [n, V] in place into the gradients of their losses; return the losses, 0 where ignored.

    `slopes` has room for the slopes of a soft cap. The second result is what of each row is still to be subtracted at
    its target: nothing, unless it may be done `apart`.
    """
    smoothing, weight, cap = objective.label_smoothing, objective.z_loss, objective.soft_cap
    if cap:
        z.div_(cap).tanh_()
        slope = torch.mul(z, z, out=slopes[: len(z)]).neg_().add_(1)
        z.mul_(cap)
    top, picked = z.amax(1, keepdim=True), z.gather(1, target_n1)
    mean = z.mean(1, keepdim=True) if smoothing else picked
    p = torch.softmax(z, 1, out=z)
    # The largest probability is 1 / sum(exp(z - top)), and never so small that its logarithm is lost.
    largest = p.amax(1, keepdim=True).log()
    losses = top - picked - largest
    if smoothing:
        losses += smoothing * (picked - mean)
    if weight:
        lse = top - largest
        losses += weight * lse * lse
        p.mul_(1 + 2 * weight * lse)
    aimed = torch.full_like(picked, 1 - smoothing)
    rest = torch.where(p.gather(1, target_n1) <= HALF, aimed, 0) if apart else torch.zeros_like(aimed)
    p.scatter_add_(1, target_n1, rest - aimed)
    if smoothing:
        p.sub_(smoothing / p.shape[1])
    p.mul_(counts_n1)
    if cap:
        p.mul_(slope)
    return losses * counts_n1, rest * counts_n1


def _scale_(rows: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar that must not be rounded to 16 bit first."""
    if rows.dtype == factor.dtype:
        rows.mul_(factor)
    else:
        rows.copy_(rows.to(factor.dtype).mul_(factor))
