"""Predict what a torch run takes on a CUDA device that is not there, and what it puts into the host's memory instead.

The device's tensors are fake ones of the *meta* device; tensors of the CPU lie in the host's memory. `pretended` makes
of every "cuda" a "meta" and calls the operators that the device would choose: its kernels of attention, and the fused
forms that the CPU lacks. `DeviceStorage` passes each allocation and each release to the simulated caching allocator,
with what kernels take for the length of a call, and what cuBLAS keeps for each thread.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from harness.backends import NO_VARIABLES, Batch, cards
from harness.backends.cards import Card
from harness.backends.cuda_allocator import Allocator, Block
from harness.backends.cuda_libraries import libraries
from harness.backends.torch_autocast import Autocast, standing_for_torchs
from harness.backends.torch_memory import LiveStorage, traced
from harness.contract.parts import Parts
from harness.records.forecast import Forecast

aten = torch.ops.aten
META = torch.device("meta")
BLAS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten.addbmm, aten.dot, aten.vdot}
"""Operators that cuBLAS computes."""
VARIABLE, EXPANDABLE = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
"""The variable by which torch's allocator is set, and the setting that lets segments grow."""
RUNNING = tuple(int(part) for part in torch.__version__.split(".")[:2])


def run(
    build: Callable[[], Parts], batch: Batch, steps: int, environment: Mapping[str, str] = NO_VARIABLES
) -> Forecast:
    """Return the peak bytes of each phase on the chosen card, which need not be there, above what priming leaves.

    Beside them stand what torch's allocator takes from the driver for it, what the driver counts for the process, and
    what lies in the host's memory instead.
    """
    card = cards.chosen()
    device = DeviceStorage(card, allocator=Allocator(expandable=EXPANDABLE in environment.get(VARIABLE, "")))
    device.settle()
    forecast = traced(build, batch, steps, device, pretended(device))
    reserved = device.allocator.peak_reserved
    return forecast._replace(
        reserved_bytes=reserved,
        driver_bytes=None if card.context_bytes is None else reserved + card.context_bytes,
        host_bytes=device.peak_host + device.pinned.locked,
        target=card.name,
    )


class DeviceStorage(LiveStorage):
    """Follow the memory of a device and, apart from it, that of the host.

    Peaks by phase are those of allocated bytes above the base: what was allocated when `settle` was called.
    """

    def __init__(
        self,
        card: Card,
        torch_version: tuple[int, int] = (RUNNING[0], RUNNING[1]),
        allocator: Allocator | None = None,
    ) -> None:
        super().__init__()
        self.card, self.libraries = card, libraries(card, torch_version)
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
        if packet in BLAS and _on_device(result):
            backward = torch._C._current_graph_task_id() != -1
            self._workspace(self.libraries.workspace, False, backward)
            if packet is aten.addmm and args[0].dim() == 1:  # with a bias cublasLt computes it
                if self.libraries.lt_stays:
                    self._workspace(self.libraries.lt_workspace, True, backward)
                else:
                    self._scratch([self.libraries.lt_workspace])
        elif packet in SCRATCH and _on_device(args[0]):
            self._scratch(SCRATCH[packet](*args))

    def _workspace(self, size: int, lt: bool, backward: bool) -> None:
        if (lt, backward) not in self._workspaces:
            self._workspaces.add((lt, backward))
            self.allocator.allocate(size)
            self._raise_peak()

    def _scratch(self, sizes: list[int]) -> None:
        blocks = [self.allocator.allocate(size) for size in sizes if size]
        self._raise_peak()
        for block in blocks:
            self.allocator.free(block)

    def _take(self, tensor: torch.Tensor, size: int) -> Block | int | None:
        if _on_device(tensor):
            return self.allocator.allocate(size) if size else None
        if self.pinning:
            self.pinned.take(size)
            return -size
        self.host += size
        self.peak_host = max(self.peak_host, self.host)
        return size

    def _give(self, taken: Block | int | None) -> None:
        if isinstance(taken, Block):
            self.allocator.free(taken)
        elif taken is not None and taken < 0:
            self.pinned.give(-taken)
        elif taken is not None:
            self.host -= taken

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


def _on_device(value: Any) -> bool:
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
    """Return delta, the gradient of the queries in float32, and those of grouped keys and values for each head."""
    B, H, T, K = q.shape
    grouped = [B * k.shape[2] * H * K * q.element_size()] * 2 if k.shape[1] != H else []
    return [B * H * _up(T, 128) * 4, B * H * _up(T, 128) * _up(K, 32) * 4, *grouped]


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


SCRATCH: dict[Any, Callable[..., list[int]]] = {
    aten._softmax_backward_data: _softmax_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
}
"""Bytes that kernels take for the length of a call, by operator; each is called with the operator's arguments."""


@contextmanager
def pretended(device: DeviceStorage) -> Iterator[None]:
    """Let code that asks for "cuda" get tensors of the meta device, and the operators that a GPU would run.

    Torch leaves a mode before it calls the function that the mode handles. What is recomputed in a backward pass needs
    it too, so it is entered again there.
    """
    mode, run_backward = Pretended(device), torch.autograd._engine_run_backward

    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = within
    try:
        with mode, standing_for_torchs(mode.autocast, ("cuda", "meta")):
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward


class Pretended(TorchFunctionMode):
    """Handle the functions of torch that a device would treat otherwise; see `pretended`."""

    def __init__(self, device: DeviceStorage) -> None:
        super().__init__()
        self.device = device
        self.autocast = Autocast(_on_device)
        self._instead: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attend,
            F.softmax: _softmax,
            torch.softmax: _softmax,
            torch.Tensor.softmax: _softmax,
            F.dropout: _dropout,
            F.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
            torch.Tensor.cuda: lambda tensor, *_, **__: tensor.to(META),
            torch.Tensor.pin_memory: self._pinned_copy,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.autocast.cast(func, args, dict(kwargs or {}))
        if (instead := self._instead.get(func)) is not None and _on_device(args[0]) | (func in EVERYWHERE):
            return instead(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = _renamed(kwargs["device"])
        if func is torch.Tensor.to or any(isinstance(each, torch.device) for each in args):
            args = tuple(_renamed(each) for each in args)
        self.device.pinning = bool(kwargs.pop("pin_memory", False))
        try:
            return func(*args, **kwargs)
        finally:
            self.device.pinning = False

    def _pinned_copy(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        self.device.pinning = True
        try:
            return tensor.clone()
        finally:
            self.device.pinning = False

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Call the kernel that the device would choose; see `attention_kernel`."""
        kernel = attention_kernel(q, k, v, attn_mask, self.device.card)
        if kernel == "flash":
            padded = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v))
            return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0][
                ..., : v.shape[-1]
            ]
        if kernel == "efficient":
            needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            return aten._scaled_dot_product_efficient_attention(
                q, k, v, attn_mask, needs, dropout_p, is_causal, scale=scale
            )[0]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


EVERYWHERE = {torch.Tensor.cuda, torch.Tensor.pin_memory}
"""What is replaced for tensors of the host too."""


def attention_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, card: Card) -> str:
    """Choose 'flash', 'efficient' or 'math' as torch does, by type, sizes and card (sdp_utils.cpp).

    `torch.nn.attention.sdpa_kernel` is heeded.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    ampere = card.capability >= (8, 0)
    K, same = q.shape[-1], q.shape[-1] == v.shape[-1]
    flash = torch.backends.cuda.flash_sdp_enabled() and half and ampere and mask is None and same and K <= 256
    if flash:
        return "flash"
    aligned = K % (8 if half else 4) == 0 and v.shape[-1] % (8 if half else 4) == 0
    supported = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and ampere)
    grouped = k.shape[-3] != q.shape[-3]
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled() and supported and aligned and not grouped
    return "efficient" if efficient else "math"


def _softmax(
    x: torch.Tensor, dim: int = -1, *rest: Any, dtype: torch.dtype | None = None, _stacklevel: int = 3, **more: Any
) -> torch.Tensor:
    """Widen half types within the kernel, as a GPU does, and not in a copy."""
    dtype = dtype or next((each for each in rest if isinstance(each, torch.dtype)), None)
    if dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16) and not more:
        return torch._softmax(x, dim, True)
    return torch.softmax(x, dim, dtype, **more)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Keep a mask of one byte for each element."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Normalise in one kernel, which keeps a number for each row."""
    return aten._fused_rms_norm(x, list(normalized_shape), weight, eps)[0]


def _renamed(value: Any) -> Any:
    kind = value.type if isinstance(value, torch.device) else value.split(":")[0] if isinstance(value, str) else ""
    return META if kind == "cuda" else value
