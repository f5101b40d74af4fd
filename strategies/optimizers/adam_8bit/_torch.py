"""Adam with 8-bit moments in torch: a slice of a tensor at a time, in place."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from harness import Parts, alike, optimizers, tree
from strategies.optimizers.adam_8bit import BLOCK, SLICE, levels, middles


def begin(p: Any, least: int) -> list[Any]:
    """Make the moments of a tensor: codes and scales of zeros, or where it is small two tensors of float32."""
    if p.numel() < least:
        return [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for _ in range(2)]
    blocks = -(-p.numel() // BLOCK)
    zero = [int((levels(signed) == 0).argmax()) for signed in (True, False)]
    codes = [torch.full((blocks, BLOCK), code, dtype=torch.uint8, device=p.device) for code in zero]
    scales = [torch.zeros(blocks, device=p.device) for _ in range(2)]
    return [codes[0], scales[0], codes[1], scales[1]]


@torch.no_grad()
def update(parts: Parts, state: Any, grads: Any) -> Any:
    """Apply the gradients in place."""
    steps = state["steps"] + 1
    device = parts.place.device
    tables = [torch.from_numpy(of(signed)).to(device) for signed in (True, False) for of in (levels, middles)]
    settings = {"steps": steps, "rate": parts.shape.learning_rate, "decay": parts.shape.weight_decay}
    move = partial(optimizers.adamw_in_torch, **settings)
    tree.mapped(partial(_whole, tables, move), state["params"], grads, state["moments"])
    return {**state, "steps": steps}


def _whole(tables: list[Any], move: Any, p: Any, g: Any, moments: list[Any]) -> None:
    """Move a tensor and its moments, slice by slice."""
    if len(moments) == 2:
        move(p, g.to(torch.float32), *moments)
        return
    first, first_scale, second, second_scale = moments
    p_N, g_N = p.view(-1), g.reshape(-1)
    step = SLICE // BLOCK
    for row in alike(range(0, len(first), step), lambda row: min(p_N.numel(), (row + step) * BLOCK) - row * BLOCK):
        rows = slice(row, row + SLICE // BLOCK)
        span = slice(row * BLOCK, min(p_N.numel(), (row + SLICE // BLOCK) * BLOCK))
        m = widened(first[rows], first_scale[rows], tables[0])
        v = widened(second[rows], second_scale[rows], tables[2])
        n = span.stop - span.start
        move(p_N[span], g_N[span].to(torch.float32), m.view(-1)[:n], v.view(-1)[:n])
        narrow(m, first[rows], first_scale[rows], tables[1], 0)
        narrow(v, second[rows], second_scale[rows], tables[3], 1)


def widened(codes: Any, scale: Any, values: Any) -> Any:
    """Look the codes up; by int32, as int64 would be the largest tensor of the step."""
    return F.embedding(codes.to(torch.int32), values[:, None]).squeeze(-1).mul_(scale[:, None])


def narrow(values: Any, codes: Any, scale: Any, between: Any, least_code: int) -> None:
    """Write the codes and scales of a slice; a block of zeros has scale 0."""
    torch.amax(values.abs(), 1, out=scale)
    values.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    codes.copy_(torch.bucketize(values, between, out_int32=True).clamp_(min=least_code))
