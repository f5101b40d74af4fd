"""Train one layer in a process of its own, measured and predicted: `python layers.py` prints both peaks of each case.

A peak is of the forward and the backward pass together, above the layer and its input.
"""

import json

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends.torch_storage import LiveStorage
from harness.machine import memory

CHANNELS = 64


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
}


def trained(layer, x, phase):
    """Run both passes within a phase of a meter."""
    with phase("pass"):
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
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
