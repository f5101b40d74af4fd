"""Causal attention to listed blocks of keys in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def attention(q_BCHK: Tensor, first: int, local: int, fixed: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend from the blocks of queries numbered `first` on to `fixed` first blocks and to `local` up to their own.

    `keys` and `values` are the blocks that any of the queries sees: the fixed ones, and those from `first - local + 1`
    on, where one before the first of all is a stand-in.
    """
    k_BPSGK, v_BPSGK = torch.stack(keys, 1), torch.stack(values, 1)
    B, P, S, G, K = k_BPSGK.shape
    C, H = q_BCHK.shape[1:3]
    if v_BPSGK.shape[-1] != K:
        raise ValueError(f"values are {v_BPSGK.shape[-1]} wide, and queries {K}: this attention takes equal widths")

    def count(upto: int) -> Tensor:
        return torch.arange(upto, device=q_BCHK.device)

    own_NL = fixed + count(C // S)[:, None] + count(local)
    table_NF = torch.cat([count(fixed).expand(len(own_NL), -1), own_NL], 1)
    number_NF = torch.cat([count(fixed), first - local + 1 + count(P - fixed)])[table_NF]
    # A fixed block that is a local one as well is seen once.
    lowest_F = torch.cat([count(fixed) * 0, count(local) * 0 + fixed])
    key_NFS = number_NF[..., None] * S + count(S)
    query_NS = (first * S + count(C)).reshape(-1, S)
    hidden_NSFS = (key_NFS[:, None] > query_NS[..., None, None]) | (number_NF < lowest_F)[:, None, :, None]

    q = q_BCHK.reshape(B, -1, S, G, H // G, K) * K**-0.5  # before the product, which overflows in float16 sooner
    k, v = (x_BPSGK[:, table_NF].flatten(2, 3) for x_BPSGK in (k_BPSGK, v_BPSGK))
    scores = torch.einsum("bnqgrk,bnsgk->bngrqs", q, k)
    wide = torch.promote_types(scores.dtype, torch.float32)
    hidden = hidden_NSFS.flatten(2)[:, None, None]
    shares = scores.to(wide).masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
    return torch.einsum("bngrqs,bnsgk->bnqgrk", shares, v).reshape(B, C, H, K)


def by_blocks(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, block: int, local: int, fixed: int, chunk: int) -> Tensor:
    """Attend some blocks of queries at a time, and recompute in the backward pass."""
    T = q_BTHK.shape[1]
    block = min(block, T)
    count = -(-T // block)
    local, fixed = min(local, count), min(fixed, count)
    together = max(1, chunk // block)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, count * block - T)) for x in (q_BTHK, k_BTGK, v_BTGK))
    # Split and not sliced: the gradient of a slice is as long as the whole, and there are many.
    keys, values = k.split(block, 1), v.split(block, 1)
    outputs = []
    for first, queries in zip(range(0, count, together), q.split(together * block, 1), strict=True):
        numbers = [*range(fixed), *(max(0, n) for n in range(first - local + 1, min(first + together, count)))]
        seen = [[blocks[n] for n in numbers] for blocks in (keys, values)]
        outputs.append(checkpoint(attention, queries, first, local, fixed, *seen, use_reentrant=False))
    return torch.cat(outputs, 1)[:, :T]
