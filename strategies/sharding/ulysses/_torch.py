"""All tokens of some heads, for some tokens of all heads, and back: in torch."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from harness import Parts
from strategies.sharding._torch import dividing, exchanged, in_a_stretch, tokens_by
from strategies.sharding.shares import TOKENS, in_order


def ulysses(parts: Parts) -> Parts:
    """Divide the tokens of every row; around attention, exchange them for all tokens of some heads."""
    inner = parts.mix

    def mix(parts: Parts, p: Any, x_BTD: Tensor) -> Tensor:
        return inner(replace(parts, attend=partial(_exchanging, parts.attend)), p, x_BTD)

    return dividing(replace(parts, mix=mix, positions=in_a_stretch), tokens_by(in_order), TOKENS)


def _exchanging(attend: Any, parts: Parts, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    R, H, G = dist.get_world_size(), q_BTHK.shape[2], k_BTGK.shape[2]
    repeats = R // math.gcd(G, R)
    if H % R or H % (G * repeats):
        raise ValueError(f"ulysses gives each of {R} ranks as many of {H} heads: take a divisor, or ring_attention")
    k_BTGK, v_BTGK = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k_BTGK, v_BTGK))
    return _all_heads(attend(parts, *(_all_tokens(x.contiguous()) for x in (q_BTHK, k_BTGK, v_BTGK))))


def _all_tokens(x_BTHK: Tensor) -> Tensor:
    """Return all tokens of this rank's heads."""
    B, T, H, K = x_BTHK.shape
    R = dist.get_world_size()
    sent = x_BTHK.view(B, T, R, H // R, K).permute(2, 0, 1, 3, 4)
    return exchanged(sent).permute(1, 0, 2, 3, 4).reshape(B, R * T, H // R, K)


def _all_heads(x_BTHK: Tensor) -> Tensor:
    """Return all heads of this rank's tokens."""
    B, T, H, K = x_BTHK.shape
    R = dist.get_world_size()
    sent = x_BTHK.reshape(B, R, T // R, H, K).permute(1, 0, 2, 3, 4)
    return exchanged(sent).permute(1, 2, 0, 3, 4).reshape(B, T // R, R * H, K)
