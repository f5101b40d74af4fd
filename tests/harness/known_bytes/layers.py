"""Train one layer in a process of its own, measured and predicted: `python layers.py` prints both peaks of each case.

A peak is of the forward and the backward pass together, above the layer and its input.
"""

import json
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from harness.backends.torch_storage import LiveStorage
from harness.machine import memory

CHANNELS = 64
WIDE = (2048, 2048)
FLOAT, HALF, TRUTH, WHOLE = torch.float32, torch.bfloat16, torch.bool, torch.int64


def lstm(width, hidden, tokens, batch, **options):
    return lambda: (nn.LSTM(width, hidden, **options), torch.ones(tokens, batch, width, requires_grad=True))


def convolution(channels=CHANNELS, outputs=CHANNELS, kernel=3, places=(16384,), make="Conv1d", last=False, **options):
    def made():
        x = torch.ones(4, channels, *places, dtype=options.get("dtype", torch.float32))
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        return getattr(nn, make)(channels, outputs, kernel, **options), x.requires_grad_()

    return made


def bilinear():
    return Both(), torch.ones(4096, 64, requires_grad=True)


def attention(by_token):
    def made():
        x = torch.ones(32, 256, 4, 128) if by_token else torch.ones(32, 4, 256, 128)
        return Attention(by_token), x.requires_grad_()

    return made


def operator(function, *types, trains=True):
    """A function of arrays of these types, of which the first is the input: zeros and ones, as numbers or truths."""

    def made():
        x, *others = (torch.ones(WIDE).tril().to(each) for each in types)
        return lambda first: function(first, *others), x.requires_grad_(trains and x.is_floating_point())

    return made


def small_pieces(x):
    """Rows that lie in the heap make an array and are gone, but for one behind which nothing can be given back."""
    rows = [row.sin() for row in x]
    last, both = rows[-1], torch.stack(rows)
    del rows
    return both + x.exp() + last


class Attention(nn.Module):
    """Attention of an array to itself, whose result lies as the array does: [B, T, H, K] or [B, H, T, K]."""

    def __init__(self, by_token):
        super().__init__()
        self.by_token = by_token

    def forward(self, x):
        heads = x.transpose(1, 2) if self.by_token else x
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return attended.transpose(1, 2) if self.by_token else attended.contiguous()


class Both(nn.Module):
    """A bilinear layer of an array and itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(64, 64, 64)

    def forward(self, x):
        return self.layer(x, x)


SQUARE = (128, 128)
CASES = {
    "lstm": lstm(256, 256, 64, 64),
    "lstm narrow": lstm(256, 100, 128, 64),
    "lstm of a large batch": lstm(256, 256, 64, 128),
    "lstm of two layers": lstm(128, 256, 64, 64, num_layers=2),
    "lstm of two directions": lstm(256, 256, 64, 64, bidirectional=True),
    "attention by token": attention(True),
    "attention by head": attention(False),
    "bilinear": bilinear,
    "convolution": convolution(),
    "convolution to more channels": convolution(outputs=2 * CHANNELS),
    "convolution of few channels": convolution(3),
    "convolution to few channels": convolution(outputs=3),
    "convolution of odd channels": convolution(60, 100),
    "convolution in groups of blocks": convolution(groups=4),
    "convolution in small groups": convolution(groups=32),
    "convolution by channel": convolution(groups=CHANNELS, padding=1),
    "convolution by channel, wide": convolution(kernel=4, groups=CHANNELS),
    "convolution with strides": convolution(stride=2),
    "convolution with gaps": convolution(dilation=4),
    "convolution in 64 bits": convolution(places=(8192,), dtype=torch.float64),
    "convolution in 64 bits in groups": convolution(places=(8192,), dtype=torch.float64, groups=4),
    "convolution in 64 bits with gaps": convolution(places=(8192,), dtype=torch.float64, dilation=2),
    "convolution of pictures": convolution(places=SQUARE, make="Conv2d"),
    "convolution of pictures with channels last": convolution(places=SQUARE, make="Conv2d", last=True),
    "transposed convolution": convolution(make="ConvTranspose1d"),
    "transposed convolution with strides": convolution(places=(48, 48), kernel=2, make="ConvTranspose2d", stride=2),
    "types: a product of 16 and 32 bits": operator(torch.mul, HALF, FLOAT),
    "types: a product of numbers and truths": operator(torch.mul, FLOAT, TRUTH),
    "types: a sum in place of 16 and 32 bits": operator(lambda x, y: x.add_(y), HALF, FLOAT, trains=False),
    "types: a comparison of 16 and 32 bits": operator(torch.gt, HALF, FLOAT),
    "types: a comparison of truths and a number": operator(lambda x: x > 2, TRUTH),
    "types: a choice among 16 and 32 bits": operator(lambda x, y, at: torch.where(at, x, y), HALF, FLOAT, TRUTH),
    "types: a row that is repeated": operator(lambda x, y: x * y[0], FLOAT, HALF),
    "types: a gather in 16 bits": operator(lambda x, at: x.gather(1, at), HALF, WHOLE),
    "types: a product in 16 bits": operator(torch.matmul, HALF, HALF),
    "types: a product in 16 bits that lies by columns": operator(lambda x, y: x.T @ y, HALF, HALF, trains=False),
    "types: a sum into rows in 16 bits": operator(lambda x, at: x.scatter_add(1, at, x), HALF, WHOLE, trains=False),
    "reduction to the third of a row": operator(lambda x: x.kthvalue(3, 1)[0], HALF, trains=False),
    "reduction of truths": operator(torch.sum, TRUTH),
    "reduction to a mean of 16 bits": operator(torch.mean, HALF),
    "reduction in 32 bits": operator(lambda x: x.sum(1, dtype=FLOAT), HALF, trains=False),
    "reduction of exponentials": operator(lambda x: x.logsumexp(1), FLOAT, trains=False),
    "reduction to a truth": operator(torch.any, WHOLE),
    "loss of squares": operator(F.mse_loss, FLOAT, FLOAT),
    "loss of squares in 16 and 32 bits": operator(F.mse_loss, HALF, FLOAT, trains=False),
    "loss of squares in 16 bits, summed": operator(partial(F.mse_loss, reduction="sum"), HALF, TRUTH, trains=False),
    "loss of Huber in 16 and 32 bits": operator(F.huber_loss, HALF, FLOAT, trains=False),
    "loss of logits": operator(F.binary_cross_entropy_with_logits, FLOAT, FLOAT),
    "loss of logits in 16 and 32 bits": operator(F.binary_cross_entropy_with_logits, HALF, FLOAT),
    "loss of logits with weights": operator(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0].float()), HALF, HALF, trains=False
    ),
    "loss of a margin in 16 bits": operator(F.soft_margin_loss, HALF, HALF, trains=False),
    "heap of small pieces": operator(small_pieces, FLOAT, trains=False),
}


def trained(layer, x, phase):
    """Run both passes within a phase of a meter."""
    with phase("pass"):
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        if y.requires_grad:
            y.backward(torch.ones_like(y))


def predicted(make):
    with FakeTensorMode(), LiveStorage() as live:
        layer, x = make()
        before = live.live
        trained(layer, x, live.phase)
        return live.peaks["pass"] - before


def measured(make):
    layer, x = make()
    memory.settle()
    meter = memory.PhaseMeter()
    meter.start()
    trained(layer, x, meter.phase)
    return meter.peak_bytes


if __name__ == "__main__":
    torch.set_num_threads(1)
    for warmed in (lstm(8, 8, 4, 4), convolution(16, 16, places=(64,))):
        trained(*warmed(), memory.PhaseMeter().phase)
    print(json.dumps({name: (measured(make), predicted(make)) for name, make in CASES.items()}))
