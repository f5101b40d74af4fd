"""Causal attention over stretches of queries and keys in torch."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def attention(q_BCHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, first: int, start: int, window: int) -> Tensor:
    """Attend from the queries at `first` on to the keys at `start` on: those not later, and less than `window` back."""
    B, C, H, K = q_BCHK.shape
    S, G = k_BSGK.shape[1:3]
    q = q_BCHK.reshape(B, C, G, H // G, K)
    scores = torch.einsum("bcgrk,bsgk->bgrcs", q, k_BSGK) * K**-0.5
    query = first + torch.arange(C, device=scores.device)[:, None]
    key = start + torch.arange(S, device=scores.device)
    hidden_CS = (key > query) | (key <= query - window)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.to(wide).masked_fill(hidden_CS, -torch.inf).softmax(-1).to(v_BSGK.dtype)
    return torch.einsum("bgrcs,bsgk->bcgrk", shares, v_BSGK).reshape(B, C, H, K)


def by_chunks(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, chunk: int, window: int) -> Tensor:
    """Attend `chunk` queries at a time, each to the keys that it can reach, and recompute in the backward pass."""
    done = []
    for first in range(0, q_BTHK.shape[1], chunk):
        last, start = min(first + chunk, q_BTHK.shape[1]), max(0, first - window + 1)
        keys, values = k_BTGK[:, start:last], v_BTGK[:, start:last]
        queries = q_BTHK[:, first:last]
        done.append(checkpoint(attention, queries, keys, values, first, start, window, use_reentrant=False))
    return torch.cat(done, dim=1)
