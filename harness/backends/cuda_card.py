"""What CUDA's libraries take on a card beside tensors: the workspaces of cuBLAS, and the context of a process."""

from typing import NamedTuple

MIB = 1 << 20


class Card(NamedTuple):
    """A kind of GPU: compute capability, bytes of its memory, and of the context of a process.

    The context holds what the driver and the loaded kernels take; None where nobody has published it.
    """

    capability: tuple[int, int]
    memory_bytes: int
    context_bytes: int | None = None


CARDS = {
    "T4": Card((7, 5), 14912 * MIB, 147718144),
    "A100-40GB": Card((8, 0), 40506 * MIB),
    "RTX 3060": Card((8, 6), 12622168064),
    "RTX 4060": Card((8, 9), 8318222336),
    "RTX 4080": Card((8, 9), 16376 * MIB),
    "H100": Card((9, 0), 81559 * MIB),
    "H200": Card((9, 0), 143771 * MIB),
}
"""Cards by name. Contexts are those of published runs: of a T4, by Anassbzdd/fitcheck (see docs/gpu_predictions.md)."""


class Libraries(NamedTuple):
    """How one version of torch uses cuBLAS: the bytes that each thread keeps for it, and for cublasLt beside it.

    `lt_kept` says whether the workspace of cublasLt stays, or is taken for each call.
    """

    workspace: int
    lt_workspace: int
    lt_kept: bool


def libraries(card: Card, torch_version: tuple[int, int]) -> Libraries:
    """Return the workspaces of a version of torch on a card (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    hopper = card.capability == (9, 0)
    workspace = 32 * MIB if hopper else 2 * 4 * MIB + 16 * 8 * 1024
    return Libraries(workspace, MIB, lt_kept=torch_version >= (2, 7))
