"""Let torch code that asks for "cuda" run on tensors of the *meta* device, by the operators that a GPU would choose.

These are its kernels of attention, and the fused forms that the CPU lacks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

from harness.backends.cards import Card
from harness.backends.torch_autocast import HALF, Autocast, standing_for_torchs
from harness.backends.torch_cuda_storage import DeviceStorage, on_device

aten = torch.ops.aten
META = torch.device("meta")


@contextmanager
def pretended(device: DeviceStorage) -> Iterator[None]:
    """Let code that asks for "cuda" get tensors of the meta device, and the operators that a GPU would run.

    Torch leaves a mode before it calls the function that the mode handles. What is recomputed in a backward pass needs
    it too, so it is entered again there.
    """
    mode, run_backward, generator = Pretended(device), torch.autograd._engine_run_backward, torch.Generator

    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = within
    torch.Generator = DeviceGenerator  # type: ignore[misc]
    try:
        with mode, standing_for_torchs(mode.autocast, ("cuda", "meta")):
            yield
    finally:
        torch.autograd._engine_run_backward = run_backward
        torch.Generator = generator  # type: ignore[misc]


class DeviceGenerator(torch.Generator):
    """A generator of the device, which draws nothing: tensors without data need no numbers.

    For a host it is torch's own.
    """

    device = META

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls) if torch.device(_renamed(device)) == META else torch._C.Generator(device)


class Pretended(TorchFunctionMode):
    """Handle the functions of torch that a device would treat otherwise; see `pretended`."""

    def __init__(self, device: DeviceStorage) -> None:
        super().__init__()
        self.device = device
        self.autocast = Autocast(on_device)
        self._instead: dict[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attend,
            **dict.fromkeys((F.softmax, torch.softmax, torch.Tensor.softmax), _softmax),
            **dict.fromkeys((F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax), _log_softmax),
            F.cross_entropy: self._cross_entropy,
            F.dropout: _dropout,
            F.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
            torch.Tensor.tolist: _without_values,
            torch.Tensor.cuda: lambda tensor, *_, **__: tensor.to(META),
            torch.Tensor.pin_memory: self._pinned_copy,
            torch.Tensor.is_pinned: lambda tensor, *_, **__: device.is_pinned(tensor),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.autocast.cast(func, args, dict(kwargs or {}))
        if (instead := self._instead.get(func)) is not None and (
            func in EVERYWHERE or any(map(on_device, (*args, *kwargs.values())))
        ):
            return instead(*args, **kwargs)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        if isinstance(kwargs.get("generator"), DeviceGenerator):
            del kwargs["generator"]
        if "device" in kwargs:
            kwargs["device"] = _renamed(kwargs["device"])
        if func is torch.Tensor.to or any(isinstance(each, torch.device) for each in args):
            args = tuple(_renamed(each) for each in args)
        self.device.pinning = bool(kwargs.pop("pin_memory", False))
        try:
            return func(*args, **kwargs)
        finally:
            self.device.pinning = False

    def _pinned_copy(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.device.pinning = True
        try:
            return tensor.clone()
        finally:
            self.device.pinning = False

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Call the kernel that the device would choose; see `attention_kernel`."""
        q, k, v = query, key, value
        kernel = attention_kernel(q, k, v, attn_mask, self.device.card, dropout_p)
        if kernel == "flash":
            padded = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v))
            return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0][
                ..., : v.shape[-1]
            ]
        if kernel in ("cudnn", "efficient"):
            added = None if attn_mask is None else _added(attn_mask, q, k, aligned=kernel == "efficient")
            needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            attend = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
            return attend(q, k, v, added, needs, dropout_p, is_causal, scale=scale)[0]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _cross_entropy(
        self, input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, **settings: Any
    ) -> torch.Tensor:
        """Under autocast widen the logarithms of probabilities, as torch does, and not the logits.

        Where labels are smoothed or are probabilities the logits are widened, which takes about as much.
        """
        if self.autocast.dtype is None or input.dtype not in HALF:
            return F.cross_entropy(input, target, weight, **settings)
        if settings.get("label_smoothing") or target.is_floating_point():
            return F.cross_entropy(input.to(torch.float32), target, weight, **settings)
        logs = torch.log_softmax(input, min(1, input.dim() - 1))
        (logs, _, weight), _ = self.autocast.cast(F.nll_loss, (logs, target, weight), {})
        return F.nll_loss(logs, target, weight, **{k: v for k, v in settings.items() if k != "label_smoothing"})


EVERYWHERE = {torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.is_pinned}
"""What is replaced for tensors of the host too."""


def _own_body(function: Any) -> Any:
    """Return a form of a function of `F` that computes where a mode is active, and does not ask the mode to."""
    asking = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(asking, lambda *_: False)}
    form = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    form.__kwdefaults__ = function.__kwdefaults__
    return form


COMPOSITES = {
    getattr(F, name): _own_body(getattr(F, name))
    for name in ("multi_head_attention_forward", "linear_cross_entropy")
    if hasattr(F, name)
}
"""Functions of Python that call others which a device would treat otherwise."""


def attention_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, card: Card, dropout_p: float = 0.0
) -> str:
    """Choose 'cudnn', 'flash', 'efficient' or 'math' as torch does, by type, sizes and card (sdp_utils.cpp).

    `torch.nn.attention.sdpa_kernel` is heeded.
    """
    if q.dim() != 4:
        return "math"
    if torch.backends.cuda.cudnn_sdp_enabled() and _takes_cudnn(q, k, v, mask, card, dropout_p):
        return "cudnn"
    half = q.dtype in HALF
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


def _takes_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, card: Card, dropout_p: float
) -> bool:
    """Check whether cuDNN is asked first, as torch 2.13 does from cuDNN 9.15 on, and takes the call.

    On Hopper and Blackwell. It has no gradient of a mask, and drops multiples of a sixteenth.
    """
    widths = q.shape[-1], v.shape[-1]
    widest = 256 if card.capability == (9, 0) else 192 if widths == (192, 128) else 128
    whole = (*q.shape[:3], k.shape[-2])
    fits = mask is None or (
        mask.dim() in (2, 4)
        and not mask.requires_grad
        and all(size in (1, of) for size, of in zip(mask.shape, whole[-mask.dim() :], strict=True))
    )
    sizes = max(widths) <= widest and all(width % 8 == 0 for width in widths)
    return card.capability[0] in (9, 10) and q.dtype in HALF and sizes and fits and dropout_p * 16 % 1 == 0


def _added(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, aligned: bool) -> torch.Tensor:
    """Return what kernels add to the scores for a mask: one of booleans is made anew in the type of the queries.

    Rows are padded to begin at multiples of 8 elements where they are to be `aligned`.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=q.dtype, device=q.device))
    if aligned and (mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1])):
        S = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - S % 8))[..., :S]
    return mask.expand(*q.shape[:3], k.shape[-2]) if aligned else mask


def _widening(function: Any, kernel: Any) -> Callable[..., torch.Tensor]:
    """Return a form of softmax or of its logarithm that widens float16 within the kernel, as a GPU does."""

    def run(
        input: torch.Tensor,
        dim: Any = -1,
        *rest: Any,
        dtype: torch.dtype | None = None,
        _stacklevel: int = 3,
        **more: Any,
    ) -> torch.Tensor:
        dtype = dtype or next((each for each in rest if isinstance(each, torch.dtype)), None)
        if dtype == torch.float32 and input.dtype == torch.float16 and not more:
            return kernel(input, dim, True)
        return function(input, dim, dtype, **more)

    return run


_softmax = _widening(torch.softmax, torch._softmax)
_log_softmax = _widening(torch.log_softmax, torch._log_softmax)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Keep a mask of one byte for each element."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Normalise in one kernel, as torch does where input and weight are of one type."""
    if weight is not None and weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, weight, math.prod(normalized_shape))


class _RmsNorm(torch.autograd.Function):
    """The kernel of a GPU: it keeps its input and a number for each row; each pass makes one tensor of that size.

    Torch has no form of it for the meta device and would take it apart, which keeps the normalised input as well.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, width: int) -> torch.Tensor:
        scale = input.new_empty(input.numel() // width, 1, dtype=torch.promote_types(input.dtype, torch.float32))
        ctx.save_for_backward(input, weight, scale)
        return input * (input.new_empty(()) if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        return grad * input, None if weight is None else torch.empty_like(weight), None


def _without_values(tensor: torch.Tensor) -> Any:
    """Raise what a fake tensor raises where its values are asked for."""
    raise DataDependentOutputException("Tensor.tolist")  # type: ignore[arg-type]


def _renamed(value: Any) -> Any:
    kind = value.type if isinstance(value, torch.device) else value.split(":")[0] if isinstance(value, str) else ""
    return META if kind == "cuda" else value
