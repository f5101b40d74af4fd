"""Let torch code that asks for "cuda" run on tensors of the *meta* device, by the operators that a GPU would choose.

These are its kernels of attention, and the fused forms that the CPU lacks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from harness.backends.cards import Card
from harness.backends.torch_autocast import Autocast, standing_for_torchs
from harness.backends.torch_cuda_storage import DeviceStorage, on_device

aten = torch.ops.aten
META = torch.device("meta")


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
        self.autocast = Autocast(on_device)
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
            torch.Tensor.is_pinned: lambda tensor, *_: device.is_pinned(tensor),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.autocast.cast(func, args, dict(kwargs or {}))
        if (instead := self._instead.get(func)) is not None and on_device(args[0]) | (func in EVERYWHERE):
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


EVERYWHERE = {torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.is_pinned}
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
