"""The row kernel: logits in, their gradient out in the same place; two reads and one write of each logit.

One program takes one row, in blocks of `BLOCK` logits. The first pass finds the largest and the sum of exponentials,
lane by lane and without a second look (Milakov and Gimelshein, 2018, arXiv:1805.02867); the second writes the
gradients. All is computed in float32. Its sizes are fixed, so nothing is tuned while a run is measured.
"""

import triton
import triton.language as tl

DEVICE = "cuda"
BLOCK, WARPS = 4096, 8
LEAST = tl.constexpr(-3.0e38)
"""Below every logit, and finite: the difference of two is no NaN."""


@triton.jit
def capped(a, cap):
    """Return cap tanh(a / cap); near 0 by its series, where the difference of exponentials has no digits left."""
    x = a / cap
    squared = x * x
    series = x * (1.0 + squared * (-1.0 / 3.0 + squared * (2.0 / 15.0 - squared * (17.0 / 315.0))))
    return cap * tl.where(squared < 0.04, series, 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0)


@triton.jit
def logits(z, inside, cap, CAPPED: tl.constexpr):
    a = tl.load(z, mask=inside, other=0.0).to(tl.float32)
    return capped(a, cap) if CAPPED else a


@triton.jit
def differentiate_rows(
    z_ptr, stride, y_ptr, seen_ptr, V, ignored, cap, smoothing, z_loss, half,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Turn each row of logits [n, V] into the gradient of its loss; write (loss, rest) of each row to `seen` [n, 2].

    `rest` is what is still to be subtracted at the target: nothing, unless APART and its probability is at most `half`.
    """
    row = tl.program_id(0).to(tl.int64)
    z, seen = z_ptr + row * stride, seen_ptr + row * 2
    y = tl.load(y_ptr + row)
    at = tl.arange(0, BLOCK)
    if y == ignored:
        for first in range(0, V, BLOCK):
            tl.store(z + first + at, tl.zeros([BLOCK], z_ptr.dtype.element_ty), mask=first + at < V)
        tl.store(seen, 0.0)
        tl.store(seen + 1, 0.0)
    else:
        tops = tl.full([BLOCK], LEAST, tl.float32)
        totals = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            inside = first + at < V
            a = logits(z + first + at, inside, cap, CAPPED)
            sums += tl.where(inside, a, 0.0)
            higher = tl.maximum(tops, tl.where(inside, a, LEAST))
            totals = totals * tl.exp(tops - higher) + tl.where(inside, tl.exp(a - higher), 0.0)
            tops = higher
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top), 0)
        picked = logits(z + y, True, cap, CAPPED)
        log_total = tl.log(total)
        lse = top + log_total
        aimed = 1.0 - smoothing
        loss = (top - picked) + log_total + smoothing * (picked - tl.sum(sums, 0) / V) + z_loss * lse * lse
        rest = tl.where(tl.exp(picked - top) <= half * total, aimed, 0.0) if APART else aimed * 0.0
        tl.store(seen, loss)
        tl.store(seen + 1, rest)
        scale = (1.0 + 2.0 * z_loss * lse) / total
        for first in range(0, V, BLOCK):
            inside = first + at < V
            a = logits(z + first + at, inside, cap, CAPPED)
            g = tl.exp(a - top) * scale - smoothing / V
            g = tl.where(first + at == y, g - (aimed - rest), g)
            if CAPPED:
                g *= 1.0 - (a / cap) * (a / cap)
            tl.store(z + first + at, g.to(z_ptr.dtype.element_ty), mask=inside)


def launch(z, y, seen, ignored, cap, smoothing, z_loss, half, apart):
    """Run the kernel on logits [n, V] of one piece, targets [n] and room for (loss, rest) [n, 2]."""
    block = min(BLOCK, triton.next_power_of_2(z.shape[1]))
    differentiate_rows[(len(z),)](
        z, z.stride(0), y, seen, z.shape[1], ignored, cap or 1.0, smoothing, z_loss, half,
        BLOCK=block, CAPPED=cap != 0, APART=apart, num_warps=WARPS,
    )  # fmt: skip
