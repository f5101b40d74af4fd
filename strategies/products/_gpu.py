"""Both kernels for a GPU, compiled by Triton; with TRITON_INTERPRET=1 they run on a CPU, for tests."""

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 16


def naive(x_NK: torch.Tensor, w_KM: torch.Tensor, y_NM: torch.Tensor) -> None:
    """Fill y with x @ w, a thread for each number."""
    _run(_naive, x_NK, w_KM, y_NM)


def tiled(x_NK: torch.Tensor, w_KM: torch.Tensor, y_NM: torch.Tensor) -> None:
    """Fill y with x @ w, tile by tile."""
    _run(_tiled, x_NK, w_KM, y_NM)


def _run(kernel: Any, x_NK: torch.Tensor, w_KM: torch.Tensor, y_NM: torch.Tensor) -> None:
    (N, K), M = x_NK.shape, w_KM.shape[1]
    kernel[triton.cdiv(N, TILE), triton.cdiv(M, TILE)](x_NK, w_KM, y_NM, N, K, M, TILE)


@triton.jit
def _of_tile(axis: tl.constexpr, TILE: tl.constexpr):
    """Return the rows or columns of a tile, in 64 bits: a matrix can have 2**31 numbers and more."""
    return (tl.program_id(axis) * TILE + tl.arange(0, TILE)).to(tl.int64)


@triton.jit
def _naive(x, w, y, N, K, M, TILE: tl.constexpr):
    n, m = _of_tile(0, TILE), _of_tile(1, TILE)
    sums = tl.zeros((TILE, TILE), dtype=x.dtype.element_ty)
    for k in range(K):  # every thread reads its own row and column from memory
        row = tl.load(x + n * K + k, mask=n < N, other=0.0)
        column = tl.load(w + m, mask=m < M, other=0.0)
        sums += row[:, None] * column[None, :]
        w += M
    tl.store(y + n[:, None] * M + m[None, :], sums, mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit
def _tiled(x, w, y, N, K, M, TILE: tl.constexpr):
    n, m = _of_tile(0, TILE), _of_tile(1, TILE)
    sums = tl.zeros((TILE, TILE), dtype=x.dtype.element_ty)
    for k0 in range(0, K, TILE):  # tiles of both lie in shared memory while they are multiplied
        k = k0 + tl.arange(0, TILE).to(tl.int64)
        a = tl.load(x + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(w + k[:, None] * M + m[None, :], mask=(k < K)[:, None] & (m < M)[None, :], other=0.0)
        sums += tl.dot(a, b, input_precision="ieee", out_dtype=x.dtype.element_ty)
    tl.store(y + n[:, None] * M + m[None, :], sums, mask=(n < N)[:, None] & (m < M)[None, :])
