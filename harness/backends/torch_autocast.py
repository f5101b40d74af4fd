"""Stand for torch's autocast on a device that is not there: cast what operators are given, as autocast on CUDA would.

Torch casts by the device of a tensor, and knows none for the meta device. The lists are those of
aten/src/ATen/autocast_mode.h, by the names under which Python calls them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

T = torch.Tensor
NARROWED = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention, F.prelu, torch.einsum,
    torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addbmm, torch.baddbmm, torch.addmv,
    torch.chain_matmul, T.matmul, T.mm, T.bmm, T.mv, T.addmm, T.addbmm, T.baddbmm, T.addmv, T.__matmul__,
    T.__rmatmul__,
}  # fmt: skip
"""Functions whose arguments are cast to the type of autocast."""
WIDENED = {
    F.layer_norm, F.group_norm, F.rms_norm, F.nll_loss, F.mse_loss, F.l1_loss, F.kl_div, F.smooth_l1_loss,
    F.huber_loss, F.softplus, F.cosine_similarity, F.binary_cross_entropy_with_logits,
    torch.layer_norm, torch.rms_norm, torch.pow, torch.exp, torch.expm1, torch.log, torch.log1p, torch.log2,
    torch.log10, torch.reciprocal, torch.rsqrt, torch.cosh, torch.sinh, torch.tan, torch.logsumexp,
    T.pow, T.__pow__, T.exp, T.expm1, T.log, T.log1p, T.log2, T.log10, T.reciprocal, T.rsqrt, T.logsumexp,
}  # fmt: skip
"""Functions whose arguments are cast to float32."""
TYPED = {
    F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.sum, torch.prod, torch.cumsum, torch.cumprod,
    torch.norm, T.softmax, T.log_softmax, T.sum, T.prod, T.cumsum, T.cumprod, T.norm,
}  # fmt: skip
"""Functions that are asked for a result in float32, where their caller names no type: their kernels widen."""
HALF = (torch.float16, torch.bfloat16)


class Autocast:
    """Whether autocast is on for the device, and the casts of parameters that it keeps until it ends."""

    def __init__(self, of_device: Callable[[Any], bool]) -> None:
        self.dtype: torch.dtype | None = None
        self._of_device = of_device
        self._depth = 0
        self._casts: dict[int, tuple[T, T]] = {}

    @contextmanager
    def set(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Cast to a type within the block, or (None) do not."""
        before, self.dtype = self.dtype, dtype
        self._depth += 1
        try:
            yield
        finally:
            self.dtype = before
            self._depth -= 1
            if not self._depth:
                self._casts.clear()

    def cast(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments in the types in which autocast has a function called."""
        if self.dtype is None:
            return args, kwargs
        if func in TYPED:
            return args, kwargs | ({"dtype": torch.float32} if self._is_untyped(args, kwargs) else {})
        if not (func in NARROWED or func in WIDENED):
            return args, kwargs
        to = self._narrow if func in NARROWED else self._widen
        cast: tuple[Any, Any] = tree_map(lambda value: to(value) if self._of_device(value) else value, (args, kwargs))
        return cast

    def _is_untyped(self, args: Any, kwargs: Any) -> bool:
        """Check whether a function gets half types of the device, and is not asked for a type."""
        named = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        first = args[0] if args else kwargs.get("input")
        return not named and kwargs.get("out") is None and self._of_device(first) and first.dtype in HALF

    def _narrow(self, tensor: T) -> T:
        if tensor.dtype == self.dtype or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        keeps = tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32 and not tensor._is_view()
        if not keeps:
            return tensor.to(self.dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor, tensor.to(self.dtype)
        return self._casts[id(tensor)][1]

    def _widen(self, tensor: T) -> T:
        return tensor.to(torch.float32) if tensor.dtype in HALF else tensor


@contextmanager
def standing_for_torchs(autocast: Autocast, devices: tuple[str, ...]) -> Iterator[None]:
    """Let torch's own functions of autocast set and ask this one, for devices of these types."""
    own = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
    own_available = torch.amp.is_autocast_available

    def entered(
        device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[Any]:
        if device_type not in devices:
            return own[0](device_type, dtype, enabled, cache_enabled)
        return autocast.set((dtype or torch.float16) if enabled else None)

    def enabled(device_type: str = devices[0]) -> bool:
        return autocast.dtype is not None if device_type in devices else own[1](device_type)

    def dtype_of(device_type: str) -> torch.dtype:
        return (autocast.dtype or torch.float16) if device_type in devices else own[2](device_type)

    torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype = entered, enabled, dtype_of  # type: ignore
    torch.amp.autocast = entered  # type: ignore
    torch.amp.is_autocast_available = lambda device_type: device_type in devices or own_available(device_type)
    try:
        yield
    finally:
        torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype = own  # type: ignore
        torch.amp.autocast = own[0]  # type: ignore
        torch.amp.is_autocast_available = own_available
