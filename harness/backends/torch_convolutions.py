"""What the CPU's libraries take of convolutions beside their results: copies in a layout of their own, or columns.

oneDNN computes on blocks of channels. Arrays whose channels come before their places are copied into such blocks, and
what is computed is copied back; arrays whose channels come last are taken as they are. What oneDNN has no kernel for
goes to torch's own product, which writes each place of the input as often as the kernel covers it (`slow_conv2d` in
ConvolutionMM2d.cpp).

Measured in float32, float64 and bfloat16 with vectors of 256 bits. With wider ones the blocks are wider, and a kernel
that takes arrays as they are is here supposed to be none: not measured.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from harness.backends import processor

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
WIDE = processor.is_wide()
BLOCK = 16 if WIDE else 8
"""Channels of a block."""
OF_CHANNEL, OF_ALL = 3, 13
"""Width of a kernel up to which the gradient of its weight is computed on blocks: of one channel, and of several."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Convolution(NamedTuple):
    """A convolution [N, I, *S] to [N, O, *R], by its arrays and options as torch has them."""

    input: torch.Tensor
    weight: torch.Tensor
    output: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    more: Sequence[int]
    groups: int

    @property
    def strided(self) -> bool:
        return max(self.stride) > 1

    @property
    def by_channel(self) -> bool:
        """Whether each channel is a group."""
        return self.groups == self.input.shape[1] == self.output.shape[1]

    @property
    def on_blocks(self) -> bool:
        """Whether groups consist of whole blocks, or are the channels."""
        channels = (self.input.shape[1] // self.groups, self.output.shape[1] // self.groups)
        return self.groups == 1 or self.by_channel or not any(each % BLOCK for each in channels)

    @property
    def back_on_blocks(self) -> bool:
        """Whether the gradient of the input is computed on blocks."""
        return self.on_blocks and (WIDE or max(self.dilation) == 1)

    @property
    def weight_on_blocks(self) -> bool:
        """Whether the gradient of the weight is computed on blocks."""
        deep = len(self.padding) == 3 and self.padding[0] > 0
        narrow = self.weight.shape[-1] <= (OF_CHANNEL if self.by_channel else OF_ALL)
        return self.back_on_blocks and (WIDE or (narrow and not deep))


def scratch(func: Any, args: Any, result: Any) -> int:
    """Return the bytes that a forward or backward pass takes beside its results while it runs."""
    forward = func is FORWARD
    inputs, weight, bias, *options = args[:9] if forward else args[1:10]
    whole = Convolution(inputs, weight, result if forward else args[0], *options)
    of_bias, sizes = (bias, None) if forward else (None, bias)
    kernel = str(torch._C._select_conv_backend(inputs, weight, of_bias, *options, sizes)).rpartition(".")[2]
    copied = _copied(inputs) + (0 if forward else _copied(whole.output))
    if kernel in ("Slow2d", "Slow3d"):
        return copied + _columns(whole, forward)
    if kernel == "SlowDilated2d":
        return copied + _columns(whole, forward) // inputs.shape[0]
    if kernel.startswith(("Slow", "Empty", "MkldnnEmpty")):
        return copied
    if copied and inputs.dim() in LAST and inputs.is_contiguous(memory_format=LAST[inputs.dim()]):
        return 2 * weight.nbytes
    return copied + (_of_output(whole) if forward else _of_gradients(whole, args[10]))


def _of_output(whole: Convolution) -> int:
    if not whole.on_blocks:
        return whole.output.nbytes
    if whole.transposed and whole.strided:  # computed with channels last, and brought into order twice
        return 2 * whole.output.nbytes
    taken = _blocked(whole.input) + whole.weight.nbytes + _blocked(whole.output)
    return taken if whole.transposed else max(taken - whole.output.nbytes, _blocked(whole.output))


def _of_gradients(whole: Convolution, wanted: Sequence[bool]) -> int:
    """Return what the gradient of the input takes beside itself, or then that of the weight."""
    of_input, of_weight = whole.input.nbytes, 0
    if whole.back_on_blocks:
        of_input = max(_blocked(whole.input), _blocked(whole.output) + _blocked(whole.input) - whole.input.nbytes)
        if whole.strided and not whole.transposed:
            of_input = 2 * whole.input.nbytes
    if whole.weight_on_blocks:
        few = whole.input.shape[1] < BLOCK  # these are read as they are
        of_weight = (0 if few else _blocked(whole.input)) + _blocked(whole.output)
    return max(of_input if wanted[0] else 0, of_weight if any(wanted[1:]) else 0)


def _blocked(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy in blocks."""
    channels = tensor.shape[1]
    return tensor.nbytes // channels * -(-channels // BLOCK) * BLOCK


def _columns(whole: Convolution, forward: bool) -> int:
    """Return the bytes of the columns of a group with its part of the arrays, or of all parts beside their whole."""
    inputs, output, groups = whole.input, whole.output, whole.groups
    kernel = math.prod(whole.weight.shape[2:])
    as_it_is = kernel == 1 and not (any(whole.padding) or whole.strided)
    columns = 0 if as_it_is else output.nbytes // output.shape[1] * kernel * inputs.shape[1] // groups
    if groups == 1:
        return columns
    parts = (inputs.nbytes + (0 if forward else output.nbytes)) // groups
    return max(columns + parts, output.nbytes if forward else inputs.nbytes)


def _copied(array: torch.Tensor) -> int:
    """Return the bytes of a copy in the order of its sizes; none where it is in that order."""
    return 0 if array.is_contiguous() else array.nbytes
