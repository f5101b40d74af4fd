"""Native sparse attention in torch, some queries at a time."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness import alike


class Sizes(NamedTuple):
    """What a token may see: blocks of `block` tokens, `blocks` of them whole, and the last `window` tokens."""

    block: int
    blocks: int
    window: int
    chunk: int


def wide(x: Tensor) -> torch.dtype:
    """Return the type of a sum or a softmax: float32 at the least."""
    return torch.promote_types(x.dtype, torch.float32)


def shares(q_BGCRK: Tensor, k_BGSK: Tensor, hidden_CS: Tensor) -> Tensor:
    """Share out [B, G, C, R, S] over the keys that are not hidden; where all are, all shares are zero."""
    scores = (q_BGCRK.flatten(2, 3) @ k_BGSK.mT).unflatten(2, q_BGCRK.shape[2:4])
    return softmax(scores, hidden_CS[:, None])


def softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    wider = scores.to(wide(scores))
    return wider.masked_fill(hidden, torch.finfo(wider.dtype).min).softmax(-1).masked_fill(hidden, 0)


def weighed(shares_BGCRS: Tensor, v_BGSK: Tensor) -> Tensor:
    """Sum the values by their shares."""
    return (shares_BGCRS.to(v_BGSK.dtype).flatten(2, 3) @ v_BGSK).unflatten(2, shares_BGCRS.shape[2:4])


def choose(weight_BGCN: Tensor, token_C: Tensor, sizes: Sizes) -> Tensor:
    """Number `blocks` blocks for each query: the first, its own, and those of the largest weights; the rest is -1."""
    N = weight_BGCN.shape[-1]
    number_N, own_C = torch.arange(N, device=token_C.device), token_C // sizes.block
    always_CN = (number_N == 0) | (number_N == own_C[:, None])
    # The bits of floats that are not negative are in their order; the number below them makes all of them differ.
    bits = weight_BGCN.float().masked_fill(always_CN, torch.inf).view(torch.int32).long()
    rank_BGCN = ((bits << 31) + (N - number_N)).masked_fill(number_N > own_C[:, None], -1)
    rank, chosen = rank_BGCN.topk(min(sizes.blocks, N), sorted=False)
    return chosen.masked_fill(rank < 0, -1)


def rows_of(chosen_BGCF: Tensor, blocks: int) -> Tensor:
    """Number the chosen blocks among those of all examples and groups; what stands for none is the first."""
    B, G = chosen_BGCF.shape[:2]
    base = torch.arange(B * G, device=chosen_BGCF.device).reshape(B, G, 1, 1) * blocks
    return (chosen_BGCF.clamp(min=0) + base).flatten()


def some(leaves: list[Tensor], k_BGNSK: Tensor, v_BGNSK: Tensor, first: int, sizes: Sizes) -> tuple[Any, ...]:
    """Attend from the queries at `first` on; give the result, the blocks that they picked, and the rows of those.

    `leaves` are queries, the means of blocks, and the keys and values of the window. What is picked is cut off the
    blocks that it comes from: its gradient is for the caller to put back.
    """
    q_BGCRK, mean_k_BGNK, mean_v_BGNK, near_k_BGWK, near_v_BGWK = leaves
    B, G, C = q_BGCRK.shape[:3]
    N, S = k_BGNSK.shape[2:4]
    if v_BGNSK.shape[-1] != k_BGNSK.shape[-1]:
        raise ValueError(
            f"values are {v_BGNSK.shape[-1]} wide, and keys {k_BGNSK.shape[-1]}: this attention takes equal widths"
        )
    q = q_BGCRK * q_BGCRK.shape[-1] ** -0.5
    token_C = first + torch.arange(C, device=q.device)

    end_N = torch.arange(1, N + 1, device=q.device) * S
    by_means = shares(q, mean_k_BGNK, end_N > token_C[:, None] + 1)
    y_means = weighed(by_means, mean_v_BGNK)

    chosen_BGCF = choose(by_means.detach().sum(3), token_C, sizes)
    rows = rows_of(chosen_BGCF, N)
    picked = [x.detach().flatten(0, 2).index_select(0, rows) for x in (k_BGNSK, v_BGNSK)]
    for x in picked:
        x.requires_grad_(torch.is_grad_enabled())
    keys, values = (x.reshape(B, G, C, -1, x.shape[-1]) for x in picked)
    key_BGCFS = chosen_BGCF[..., None] * S + torch.arange(S, device=q.device)
    hidden = (key_BGCFS > token_C[:, None, None]) | (key_BGCFS < 0)
    by_choice = softmax(q @ keys.mT, hidden.flatten(3)[:, :, :, None])
    y_chosen = by_choice.to(values.dtype) @ values

    reach = near_k_BGWK.shape[2]
    back_CW = token_C[:, None] - (first + C - reach) - torch.arange(reach, device=q.device)
    y_near = weighed(shares(q, near_k_BGWK, (back_CW < 0) | (back_CW >= sizes.window)), near_v_BGWK)
    return ((y_means.to(wide(q)) + y_chosen + y_near) / 3).to(q.dtype), picked, rows


class ByChunks(torch.autograd.Function):
    """Attend `chunk` queries at a time, keeping the inputs alone.

    The gradient of what a chunk gathers is added to one buffer in place. Autograd would make a gradient as long as
    all keys for each chunk, and so take time that grows with the square of the length.
    """

    @staticmethod
    def forward(ctx: Any, sizes: Sizes, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.sizes = sizes
        y = torch.empty_like(inputs[0])
        k, v = in_blocks(inputs, sizes)
        for first in chunks(y.shape[2], sizes):
            y[:, :, first : first + sizes.chunk] = some(read(inputs, first, sizes), k, v, first, sizes)[0]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sizes: Sizes = ctx.sizes
        inputs = ctx.saved_tensors
        sums = [torch.zeros_like(x, dtype=wide(x)) for x in inputs]
        (k, v), block_sums = in_blocks(inputs, sizes), in_blocks(sums, sizes)
        for first in chunks(dy.shape[2], sizes):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in read(inputs, first, sizes)]
                y, picked, rows = some(leaves, k, v, first, sizes)
            gradients = torch.autograd.grad(y, [*leaves, *picked], dy[:, :, first : first + sizes.chunk])
            for total, part in zip(read(sums, first, sizes), gradients[:5], strict=True):
                total += part
            for total, part in zip(block_sums, gradients[5:], strict=True):
                total.flatten(0, 2).index_add_(0, rows, part.to(total.dtype))
            del leaves, y, picked, rows, gradients, total, part  # else they stand beside those of the next chunk
        return None, *(total.to(x.dtype) for total, x in zip(sums, inputs, strict=True))


def chunks(tokens: int, sizes: Sizes) -> Iterable[int]:
    """Number the first token of each chunk; all chunks do the same behind the first window, but for a shorter last."""
    return alike(
        range(0, tokens, sizes.chunk),
        lambda first: (min(sizes.chunk, tokens - first), min(first, sizes.window - 1)),
    )


def read(inputs: Any, first: int, sizes: Sizes) -> list[Tensor]:
    """View what the chunk at `first` reads but for the blocks it chooses: queries, means, and those in the window."""
    q_BGTRK, k_BGTK, v_BGTK, mean_k_BGNK, mean_v_BGNK = inputs
    last, start = min(first + sizes.chunk, q_BGTRK.shape[2]), max(0, first - sizes.window + 1)
    return [q_BGTRK[:, :, first:last], mean_k_BGNK, mean_v_BGNK, k_BGTK[:, :, start:last], v_BGTK[:, :, start:last]]


def in_blocks(inputs: Any, sizes: Sizes) -> list[Tensor]:
    """View the keys and values in blocks [B, G, N, block, K]."""
    return [x_BGTK.unflatten(2, (-1, sizes.block)) for x_BGTK in inputs[1:3]]


def attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, block: int, blocks: int, window: int, chunk: int
) -> Tensor:
    """Average attention to the means of blocks, to chosen blocks and to a window."""
    T, G = k_BTGK.shape[1:3]
    sizes = Sizes(block, blocks, window, chunk)
    q_BGTRK = q_BTHK.unflatten(2, (G, -1)).transpose(1, 2).contiguous()
    keys = [F.pad(x.transpose(1, 2), (0, 0, 0, -T % block)).contiguous() for x in (k_BTGK, v_BTGK)]
    means = [x.unflatten(2, (-1, block)).mean(3) for x in keys]  # that of a last block with padding is never seen
    return ByChunks.apply(sizes, q_BGTRK, *keys, *means).transpose(1, 2).flatten(2, 3)
