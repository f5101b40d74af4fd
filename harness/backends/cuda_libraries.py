"""What CUDA's libraries keep on a card beside tensors: the workspaces of cuBLAS."""

from typing import NamedTuple

from harness.backends.cards import MIB, Card

DEVICE = "cuda"


class Libraries(NamedTuple):
    """How one version of torch uses cuBLAS: the bytes that each thread keeps for it, and for cublasLt beside it.

    `lt_stays` says whether the workspace of cublasLt stays, or is taken for each call.
    """

    workspace: int
    lt_workspace: int
    lt_stays: bool


def libraries(card: Card, torch_version: tuple[int, int]) -> Libraries:
    """Return the workspaces of a version of torch on a card (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    major, _ = card.capability
    large = major == 9 or (major > 9 and torch_version >= (2, 12))
    workspace = 32 * MIB if large else 2 * 4 * MIB + 16 * 8 * 1024
    return Libraries(workspace, MIB, lt_stays=torch_version >= (2, 7))
