"""Both kernels for a CPU, compiled by numba; rows of the result are divided among the threads that torch has."""

import os
from typing import Any

import numba
import numpy as np
import torch

TILE = 16


def naive(x_NK: torch.Tensor, w_KM: torch.Tensor, y_NM: torch.Tensor) -> None:
    """Fill y with x @ w, number by number."""
    _run(_naive, x_NK, w_KM, y_NM)


def tiled(x_NK: torch.Tensor, w_KM: torch.Tensor, y_NM: torch.Tensor) -> None:
    """Fill y with x @ w, tile by tile."""
    _run(_tiled, x_NK, w_KM, y_NM)


def _run(kernel: Any, *tensors: torch.Tensor) -> None:
    numba.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    kernel(*(tensor.detach().numpy() for tensor in tensors))


@numba.njit(parallel=True)
def _naive(x: Any, w: Any, y: Any) -> None:
    for n in numba.prange(x.shape[0]):
        for m in range(w.shape[1]):
            total = x.dtype.type(0)
            for k in range(x.shape[1]):
                total += x[n, k] * w[k, m]
            y[n, m] = total


@numba.njit(parallel=True)
def _tiled(x: Any, w: Any, y: Any) -> None:
    N, K, M = x.shape[0], x.shape[1], w.shape[1]
    for block in numba.prange((N + TILE - 1) // TILE):
        n0 = block * TILE
        a = np.zeros((TILE, TILE), x.dtype)
        b = np.zeros((TILE, TILE), x.dtype)
        sums = np.zeros((TILE, TILE), x.dtype)
        for m0 in range(0, M, TILE):
            sums[:] = 0
            for k0 in range(0, K, TILE):
                for i in range(TILE):
                    for k in range(TILE):
                        inside_x, inside_w = n0 + i < N and k0 + k < K, k0 + i < K and m0 + k < M
                        a[i, k] = x[n0 + i, k0 + k] if inside_x else 0
                        b[i, k] = w[k0 + i, m0 + k] if inside_w else 0
                for i in range(TILE):
                    for k in range(TILE):
                        for j in range(TILE):
                            sums[i, j] += a[i, k] * b[k, j]
            for i in range(min(TILE, N - n0)):
                for j in range(min(TILE, M - m0)):
                    y[n0 + i, m0 + j] = sums[i, j]
