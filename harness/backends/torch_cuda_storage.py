"""Follow the memory of a CUDA device that is not there, and of the host beside it, while a torch run goes on.

The device's tensors are fake ones of the *meta* device; tensors of the CPU lie in the host's memory. Each allocation
and each release goes to the simulated caching allocator, with what kernels take for the length of a call, and what
cuBLAS keeps for each thread.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from harness.backends.cards import Card
from harness.backends.cuda_allocator import Allocator, Block
from harness.backends.cuda_libraries import libraries
from harness.backends.torch_storage import LiveStorage

aten = torch.ops.aten
BLAS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.addbmm, aten.dot, aten.vdot}
"""Operators that cuBLAS computes."""
DEVICE, PINNED, HOST = "device", "pinned", "host"
"""The memories of a run: that of the device, and of the host's what is locked and the rest."""
IN_PLACE = (2, 7)
"""From which version on a gradient is added into another of the same tensor: 2.11 does so on an H200."""
RUNNING = tuple(int(part) for part in torch.__version__.split(".")[:2])


class DeviceStorage(LiveStorage):
    """Follow the memory of a device and, apart from it, that of the host.

    Peaks by phase are those of allocated bytes above the base: what was allocated when `settle` was called.
    """

    room = DEVICE

    def __init__(
        self,
        card: Card,
        torch_version: tuple[int, int] = (RUNNING[0], RUNNING[1]),
        allocator: Allocator | None = None,
    ) -> None:
        super().__init__()
        self.card, self.libraries, self.torch_version = card, libraries(card, torch_version), torch_version
        self.allocator = allocator or Allocator()
        self.base = 0
        self.host = self.peak_host = 0
        self.pinned = PinnedHost()
        self.pinning = False
        self._workspaces: set[tuple[bool, bool]] = set()

    def settle(self) -> None:
        """Let both threads have multiplied once, as priming does; what is allocated then is the base."""
        for backward in (False, True):
            self._workspace(self.libraries.workspace, False, backward)
        self.base = self.allocator.allocated

    def _returned(self, func: Any, args: Any, result: Any) -> None:
        """Count the results, then what the operator takes beside them: workspaces to keep, scratch to give back."""
        self._count_all(result)
        packet = func._overloadpacket
        if packet in BLAS and on_device(result):
            backward = torch._C._current_graph_task_id() != -1
            self._workspace(self.libraries.workspace, False, backward)
            if packet is aten.addmm and args[0].dim() == 1:  # with a bias cublasLt computes it
                if self.libraries.lt_stays:
                    self._workspace(self.libraries.lt_workspace, True, backward)
                else:
                    self._scratch([self.libraries.lt_workspace])
        elif packet in SCRATCH and on_device(args[0]):
            self._scratch(SCRATCH[packet](*args))

    def _workspace(self, size: int, lt: bool, backward: bool) -> None:
        if (lt, backward) not in self._workspaces:
            self._workspaces.add((lt, backward))
            self.allocator.allocate(size)
            self._raise_peak()

    def _scratch(self, sizes: list[int]) -> None:
        pieces = [self._begin(size, self._maker(DEVICE)) for size in sizes if size]
        for piece in pieces:
            self._end(piece)

    def _room(self, tensor: torch.Tensor) -> str:
        return DEVICE if on_device(tensor) else PINNED if self.pinning else HOST

    def _take(self, room: str, size: int) -> Block | int | None:
        if room == DEVICE:
            return self.allocator.allocate(size) if size else None
        if room == PINNED:
            self.pinned.take(size)
            return -size
        self.host += size
        self.peak_host = max(self.peak_host, self.host)
        return size

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in page-locked memory."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known is not None and self.ledger.makers[known[1].block].room == PINNED

    def _sums_in_place(self, one: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> bool:
        """Check whether the version of torch adds gradients as this one: runs of early 2025 took a third tensor."""
        return self.torch_version >= IN_PLACE and super()._sums_in_place(one, other, alpha)

    def _give(self, block: Block | int | None) -> None:
        if isinstance(block, Block):
            self.allocator.free(block)
        elif block is not None and block < 0:
            self.pinned.give(-block)
        elif block is not None:
            self.host -= block

    def now(self) -> int:
        return self.allocator.allocated - self.base


class PinnedHost:
    """Count page-locked memory as torch's allocator for it does: blocks are powers of two, and stay locked."""

    def __init__(self) -> None:
        self.locked = 0
        self._free: Counter[int] = Counter()

    def take(self, size: int) -> None:
        block = 1 << max(0, size - 1).bit_length()
        if self._free[block]:
            self._free[block] -= 1
        else:
            self.locked += block

    def give(self, size: int) -> None:
        self._free[1 << max(0, size - 1).bit_length()] += 1


def on_device(value: Any) -> bool:
    """Return whether a value is a tensor of the device."""
    if not isinstance(value, torch.Tensor):
        return False
    device = value.__dict__.get("fake_device") or value.device  # a fake tensor asks torch for its device
    return bool(device.type == "meta")


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> list[int]:
    """Return the product of gradient and output, which the kernel makes first."""
    return [output.numel() * max(grad.element_size(), output.element_size())]


def _efficient_backward(grad: torch.Tensor, q: torch.Tensor, *_: Any) -> list[int]:
    """Return delta, and the gradients that are summed in float32 before they are narrowed."""
    B, H, T, K = q.shape
    if q.element_size() == 4:
        return [q.numel() * 4, B * H * T * 4]
    return [B * H * T * 4, B * H * _up(T, 64) * _up(K, 64) * 4]


def _flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any) -> list[int]:
    """Return delta, the gradient of the queries in float32, and those of grouped keys and values for each head.

    cuDNN's asks for the first two as well (scaled_dot_product_flash_attention.h of its frontend).
    """
    B, H, T, K = q.shape
    grouped = [B * k.shape[2] * H * K * q.element_size()] * 2 if k.shape[1] != H else []
    return [B * H * _up(T, 128) * 4, B * H * _up(T, 128) * _up(K, 32) * 4, *grouped]


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


SCRATCH: dict[Any, Callable[..., list[int]]] = {
    aten._softmax_backward_data: _softmax_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _flash_backward,
}
"""Bytes that kernels take for the length of a call, by operator; each is called with the operator's arguments."""
