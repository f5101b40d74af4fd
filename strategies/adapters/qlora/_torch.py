"""Matrices of 4 bits in torch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from harness import Parts
from strategies.adapters.qlora import BLOCK, LARGEST, LEVELS, OF_PARTS, OUTER, is_matrix, wide

Packed = dict[str, Tensor]
"""`codes` [rows, columns / 2], two to a byte; `scales` of blocks, `outer` scales of those, and their `mean`; `levels`
of the codes, in the type that the matrix is widened to."""


def quantised(parts: Parts) -> Parts:
    """Draw the matrices of layers in 4 bits, and widen each for its product alone."""
    inner_draw, inner_linear = parts.draw, parts.linear

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        value = inner_draw(parts, name, shape, deviation)
        if not is_matrix(name, shape):
            return value
        if value.shape != shape:
            raise ValueError(OF_PARTS)
        return packed(value)

    def linear(parts: Parts, p: Any, name: str, x: Tensor) -> Tensor:
        key = wide(p, name)
        if not isinstance(p[key], dict):
            return inner_linear(parts, p, name, x)
        matrix = widened(p[key])
        storage = matrix.untyped_storage()._cdata

        def keep(saved: Tensor) -> Any:
            if saved.untyped_storage()._cdata != storage:
                return saved
            return saved.shape, saved.stride(), saved.storage_offset()

        def again(saved: Any) -> Tensor:
            return widened(p[key]).as_strided(*saved) if isinstance(saved, tuple) else saved

        with saved_tensors_hooks(keep, again):
            return inner_linear(parts, _with_wide(parts, p, name, matrix), name, x)

    return replace(parts, draw=draw, linear=linear)


def _with_wide(parts: Parts, p: Any, name: str, matrix: Tensor) -> Any:
    """Return a layer's parameters with a wide matrix; that of a module also by the name it has elsewhere, [in, out]."""
    key = wide(p, name)
    if key == name:
        return {**p, name: matrix}
    bias = p.get(f"{name}.bias")
    biases = {} if bias is None else {f"b{name}": bias}
    return {**p, key: matrix, name: matrix.T if parts.outputs_first(f"layers.0.module.{key}") else matrix, **biases}


@torch.no_grad()
def packed(matrix: Tensor) -> Packed:
    """Round a matrix to 4 bits."""
    numbers = torch.nn.functional.pad(matrix.float().flatten(), (0, -matrix.numel() % BLOCK)).view(-1, BLOCK)
    largest = numbers.abs().amax(1)
    scales, outer, mean = _packed_scales(largest)
    # a block is rounded by the scale that it is widened with
    scaled = numbers / _scales(scales, outer, mean)[:, None].clamp(min=1e-30)
    levels = torch.tensor(LEVELS, device=matrix.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(scaled, middles).to(torch.uint8).flatten()[: matrix.numel()]
    pairs = codes.view(*matrix.shape[:-1], -1, 2)
    return {
        "codes": pairs[..., 0] << 4 | pairs[..., 1],
        "scales": scales,
        "outer": outer,
        "mean": mean,
        "levels": levels.to(matrix.dtype, copy=True),  # a prediction looks at a constant anew in each product
    }


def _packed_scales(largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round the scales of blocks to 8-bit floats; return them with their scales and their mean."""
    mean = largest.mean()
    blocks = torch.nn.functional.pad(largest - mean, (0, -len(largest) % OUTER)).view(-1, OUTER)
    outer = blocks.abs().amax(1).clamp(min=1e-30)
    scales = (blocks / outer[:, None] * LARGEST).to(torch.float8_e4m3fn).flatten()[: len(largest)]
    return scales.clone(), outer, mean


def _scales(scales: Tensor, outer: Tensor, mean: Tensor) -> Tensor:
    """Widen the scales of blocks."""
    return scales.float() / LARGEST * outer.repeat_interleave(OUTER)[: len(scales)] + mean


@torch.no_grad()
def widened(matrix: Packed) -> Tensor:
    """Return the matrix in the type that it was drawn in."""
    codes, levels = matrix["codes"], matrix["levels"]
    both = torch.cartesian_prod(levels, levels)  # the two numbers of each byte
    numbers = both.index_select(0, codes.flatten().int()).flatten()
    scales = _scales(matrix["scales"], matrix["outer"], matrix["mean"]).to(levels.dtype)
    whole = len(numbers) // BLOCK
    numbers[: whole * BLOCK].view(-1, BLOCK).mul_(scales[:whole, None])
    numbers[whole * BLOCK :].mul_(scales[whole:])  # the last block may be short
    return numbers.view(*codes.shape[:-1], -1)
