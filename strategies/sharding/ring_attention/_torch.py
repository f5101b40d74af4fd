"""Ring attention as one `torch.autograd.Function` around the framework's own fused kernels.

A kernel gives the result of some queries on some keys and the logarithm of its sum of exponentials. With the result and
the logarithm of all keys in their place, its backward pass gives those keys' share of the gradients.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.sharding._torch import passed_on

aten = torch.ops.aten
ALL, LATER, EARLIER = slice(None), "later", "earlier"


def ring_attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, zigzag: bool) -> Tensor:
    """Attend causally from this rank's queries to the keys and values of all ranks; [B, T, H, K] of its own tokens."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BTHK, k_BTGK, v_BTGK))
    return _Ring.apply(q, k, v, zigzag).transpose(1, 2)


class Piece(NamedTuple):
    """Which queries attend to which keys of a source, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


def piece(rank: int, source: int, tokens: int, zigzag: bool) -> Piece | None:
    """Return what a rank attends to of a source's keys: all of the earlier ones, its own causally, none of the later.

    In zigzag order every rank has an early and a late block: of an earlier source all queries see the early one, and
    of a later one the late queries see both.
    """
    if source == rank:
        return Piece(ALL, ALL, True)
    if not zigzag:
        return Piece(ALL, ALL, False) if source < rank else None
    half = tokens // 2
    return Piece(ALL, slice(0, half), False) if source < rank else Piece(slice(half, None), ALL, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, zigzag: bool) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = None, None
        keys, values = k, v
        for turn in range(ranks):
            here = piece(rank, (rank - turn) % ranks, q.shape[2], zigzag)
            if here is not None:
                some, some_lse = attended(
                    q[:, :, here.queries], keys[:, :, here.keys], values[:, :, here.keys], here.causal
                )
                if out is None or lse is None:  # its own keys come first, and every query sees some of them
                    out, lse = some.to(wide), some_lse
                else:
                    merge_(out[:, :, here.queries], lse[:, :, here.queries], some, some_lse)
            if turn < ranks - 1:
                keys, values = passed_on(keys, values)
        assert out is not None and lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.zigzag = zigzag
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        wide = torch.promote_types(q.dtype, torch.float32)
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        keys, values = k, v
        for turn in range(ranks):
            here = piece(rank, (rank - turn) % ranks, q.shape[2], ctx.zigzag)
            if here is not None:
                at, of = here.queries, here.keys
                seen = grad[:, :, at], q[:, :, at], keys[:, :, of], values[:, :, of], out[:, :, at], lse[:, :, at]
                some_q, some_k, some_v = gradients(*seen, here.causal)
                dq[:, :, at] += some_q
                dk[:, :, of] += some_k
                dv[:, :, of] += some_v
                del some_q, some_k, some_v
            if turn < ranks - 1:
                keys, values, dk, dv = passed_on(keys, values, dk, dv)
            elif ranks > 1:
                dk, dv = passed_on(dk, dv)  # home again
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def merge_(out: Tensor, lse: Tensor, some: Tensor, some_lse: Tensor) -> None:
    """Add in place what more keys give to what was seen of others."""
    total = torch.logaddexp(lse, some_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(some * (some_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the result [B, H, T, K] and the logarithm of the sums [B, H, T] in float32."""
    q, k, v = q.contiguous(), *repeated(q, k, v)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[:, :, : q.shape[2]]


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys contribute to the gradients of queries, keys and values."""
    groups = k.shape[1]
    k, v = repeated(q, k, v)
    grad, q, out, lse = grad.contiguous(), q.contiguous(), out.contiguous(), lse.contiguous()
    if q.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    else:
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout, so no seed
        filled = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))  # the kernel reads whole blocks of 32
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, filled, nothing, nothing, 0.0, [True, True, True, False], causal
        )
    return dq, *(each.unflatten(1, (groups, -1)).sum(2) for each in (dk, dv))


def repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values, so that each head of the queries has its own."""
    times = q.shape[1] // k.shape[1]
    return tuple(x.repeat_interleave(times, 1) if times > 1 else x.contiguous() for x in (k, v))  # type: ignore[return-value]
