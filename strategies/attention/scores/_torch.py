"""Causal attention over stretches of queries and keys in torch."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def attention(q_BCHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, first: int, start: int, window: int) -> Tensor:
    """Attend from the queries at `first` on to the keys at `start` on: those not later, and less than `window` back."""
    B, C, H, K = q_BCHK.shape
    S, G = k_BSGK.shape[1:3]
    if v_BSGK.shape[-1] != K:
        raise ValueError(f"values are {v_BSGK.shape[-1]} wide, and queries {K}: this attention takes equal widths")
    q = q_BCHK.reshape(B, C, G, H // G, K) * K**-0.5  # before the product, which overflows in float16 sooner
    scores = torch.einsum("bcgrk,bsgk->bgrcs", q, k_BSGK)
    query = first + torch.arange(C, device=scores.device)[:, None]
    key = start + torch.arange(S, device=scores.device)
    hidden_CS = (key > query) | (key <= query - window)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.to(wide).masked_fill(hidden_CS, -torch.inf).softmax(-1).to(v_BSGK.dtype)
    return torch.einsum("bgrcs,bsgk->bcgrk", shares, v_BSGK).reshape(B, C, H, K)


def by_chunks(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, chunk: int) -> Tensor:
    """Attend `chunk` queries at a time to all keys that are not later, and recompute in the backward pass."""
    T, outputs = q_BTHK.shape[1], []
    for first, queries in zip(range(0, T, chunk), q_BTHK.split(chunk, 1), strict=True):
        last = first + queries.shape[1]
        seen = k_BTGK[:, :last], v_BTGK[:, :last]
        outputs.append(checkpoint(attention, queries, *seen, first, 0, T, use_reentrant=False))
    return torch.cat(outputs, dim=1)


def by_windows(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, window: int) -> Tensor:
    """Attend `window` queries at a time to their keys and to as many before, and recompute in the backward pass."""

    def near(q_BCHK: Tensor, first: int, start: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return attention(q_BCHK, torch.cat(keys, 1), torch.cat(values, 1), first, start, window)

    # Split and not sliced: the gradient of a slice is as long as the whole, and there are many.
    keys, values = list(k_BTGK.split(window, 1)), list(v_BTGK.split(window, 1))
    outputs = []
    for number, queries in enumerate(q_BTHK.split(window, 1)):
        before = max(0, number - 1)
        seen = keys[before : number + 1], values[before : number + 1]
        outputs.append(checkpoint(near, queries, number * window, before * window, *seen, use_reentrant=False))
    return torch.cat(outputs, dim=1)
