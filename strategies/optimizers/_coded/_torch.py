"""Adam with coded moments in torch: a slice of a tensor at a time, in place."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensor

from harness import Parts, alike, optimizers, tree
from strategies.optimizers import _coded
from strategies.optimizers._coded import Codes


class Tables(NamedTuple):
    """The levels of a moment on the device, the middles between them, and its lowest code."""

    levels: Any
    middles: Any
    least: int


def begin(codes: Codes, p: Any, least: int) -> list[Any]:
    """Make the moments of a tensor: codes and scales of zeros, or where it is small two tensors of float32."""
    if p.numel() < least:
        return [torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for _ in range(2)]
    blocks = -(-p.numel() // codes.block)
    size = blocks, codes.bytes_of_block
    first, second = (
        torch.full(size, codes.zero(signed), dtype=torch.uint8, device=p.device) for signed in (True, False)
    )
    scales = [torch.zeros(blocks, device=p.device) for _ in range(2)]
    return [first, scales[0], second, scales[1]]


ON_DEVICE: dict[tuple[Codes, str], list[Tables]] = {}
"""Tables that lie on a device: to copy them there, the host would wait for it."""


def tables_of(codes: Codes, device: str) -> list[Tables]:
    """Return the tables of both moments."""
    if (codes, device) in ON_DEVICE:
        return ON_DEVICE[codes, device]
    tables = [
        Tables(
            torch.from_numpy(codes.levels(signed)).to(device),
            torch.from_numpy(codes.middles(signed)).to(device),
            0 if signed else codes.least_second,
        )
        for signed in (True, False)
    ]
    if device != "cpu" and not isinstance(tables[0].levels, FakeTensor):
        ON_DEVICE[codes, device] = tables
    return tables


@torch.no_grad()
def update(codes: Codes, parts: Parts, state: Any, grads: Any) -> Any:
    """Apply the gradients in place."""
    steps = state["steps"] + 1
    tables = tables_of(codes, parts.place.device)
    settings = {"steps": steps, "rate": parts.shape.learning_rate, "decay": parts.shape.weight_decay}
    move = partial(optimizers.adamw_in_torch, **settings)
    tree.mapped(partial(_whole, codes, tables, move), state["params"], grads, state["moments"])
    return {**state, "steps": steps}


def _whole(codes: Codes, tables: list[Tables], move: Any, p: Any, g: Any, moments: list[Any]) -> None:
    """Move a tensor and its moments, slice by slice."""
    if len(moments) == 2:
        move(p, g.to(torch.float32), *moments)
        return
    first, first_scale, second, second_scale = moments
    p_N, g_N = p.view(-1), g.reshape(-1)
    block, step = codes.block, _coded.SLICE // codes.block
    for row in alike(range(0, len(first), step), lambda row: min(p_N.numel(), (row + step) * block) - row * block):
        rows = slice(row, row + step)
        span = slice(row * block, min(p_N.numel(), (row + step) * block))
        m = widened(codes, first[rows], first_scale[rows], tables[0])
        v = widened(codes, second[rows], second_scale[rows], tables[1])
        n = span.stop - span.start
        move(p_N[span], g_N[span].to(torch.float32), m.view(-1)[:n], v.view(-1)[:n])
        narrow(codes, m, first[rows], first_scale[rows], tables[0])
        narrow(codes, v, second[rows], second_scale[rows], tables[1])


def widened(codes: Codes, packed: Any, scale: Any, tables: Tables) -> Any:
    """Look the codes up [rows, block]; by int32, as int64 would be the largest tensor of the step."""
    if codes.bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return F.embedding(packed.to(torch.int32), tables.levels[:, None]).squeeze(-1).mul_(scale[:, None])


def narrow(codes: Codes, values: Any, packed: Any, scale: Any, tables: Tables) -> None:
    """Write the codes and scales of a slice; a block of zeros has scale 0."""
    torch.amax(values.abs(), 1, out=scale)
    values.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    each = torch.bucketize(values, tables.middles, out_int32=True).clamp_(min=tables.least)
    packed.copy_(each if codes.bits == 8 else each[:, ::2] | each[:, 1::2] << 4)
