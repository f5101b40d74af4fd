"""Single operators as Liger-Kernel and Apple's CCE measured them: their plain forms in torch.

Each function makes the operator's inputs and returns what the benchmark calls again and again. The scripts are those of
Liger-Kernel's benchmark folder at the commit that the rows name.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from published.machine import Refused, device_of
from published.texts import dtype_of

META = torch.device("meta")
ITERATIONS = 10
"""How often Liger's benchmark measures; it takes the median."""
Full = Callable[[], None]


def predicted(row: dict[str, Any]) -> dict[str, int]:
    """Return the allocated and reserved bytes of an operator's row. Raises Refused."""
    name = row["model"].removeprefix("op:").split(" ")[0]
    if name not in OPERATORS:
        raise Refused(f"there is no plain form of '{name}' here: published.operators lists those that there are")
    if str(row["op_config"].get("variant", "baseline")).lower() not in ("baseline", "torch"):
        raise Refused(f"'{row['op_config']['variant']}' is compiled, or a kernel of its own, whose memory torch hides")
    with device_of(row) as device:
        full = OPERATORS[name](row)
        peaks = []
        for _ in range(ITERATIONS):
            device.allocator.reset_peaks()
            full()
            peaks.append(device.allocator.peak_allocated)
        return {"allocated_bytes": int(median(peaks)), "reserved_bytes": device.allocator.peak_reserved}


class RMSNorm(nn.Module):
    """Normalise in float32 and narrow again, as LlamaRMSNorm does; its weight stays in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=META))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


def rms_norm(row: dict[str, Any]) -> Full:
    sizes = row["op_config"]
    layer, *others = (RMSNorm(sizes["H"]) for _ in range(3))  # the forms that it is compared with are there too
    x = torch.randn(sizes["M"], sizes["H"], dtype=dtype_of(sizes["dtype"]), device=META)
    dy = torch.randn_like(x)
    x.requires_grad_(True)

    def full(_: Any = others) -> None:
        y = layer(x)
        y.backward(dy, retain_graph=True)

    return full


def rope(row: dict[str, Any]) -> Full:
    sizes, dtype = row["op_config"], dtype_of(row["op_config"]["dtype"])
    heads, key_heads = 32, 8
    T, K = sizes["T"], sizes["H"] // heads
    q = torch.randn(1, T, heads, K, device=META, requires_grad=True, dtype=dtype).transpose(1, 2)
    k = torch.randn(1, T, key_heads, K, device=META, requires_grad=True, dtype=dtype).transpose(1, 2)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    inverse = torch.empty(K // 2, device=META)
    positions = torch.empty(1, T, dtype=torch.int64, device=META)
    angles = (inverse[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    both = torch.cat((angles, angles), -1)
    cos, sin = both.cos().to(dtype), both.sin().to(dtype)
    del angles, both
    tables = inverse, positions  # the benchmark keeps them beside

    def full(_: Any = tables) -> None:
        cos_, sin_ = cos.unsqueeze(1), sin.unsqueeze(1)
        q_out, k_out = (x * cos_ + _half_turned(x) * sin_ for x in (q, k))
        torch.autograd.grad((q_out, k_out), (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return full


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def cross_entropy(row: dict[str, Any]) -> Full:
    sizes = row["op_config"]
    tokens = sizes.get("BT") or sizes["B"] * sizes["T"]
    x = torch.randn(tokens, sizes["V"], requires_grad=True, device=META)
    target = torch.randint(sizes["V"], (tokens, 1), device=META).squeeze(1)

    def full() -> None:
        F.cross_entropy(x, target).backward()

    return full


def gated(activation: Callable[[torch.Tensor], torch.Tensor], row: dict[str, Any]) -> Full:
    """Make LlamaMLP: its weights come in float32 and are narrowed on the device."""
    sizes, dtype = row["op_config"], dtype_of(row["op_config"]["dtype"])
    H, inner = sizes["H"], sizes["I"]
    x = torch.randn(sizes["B"], sizes["T"], H, device=META, dtype=dtype, requires_grad=True)
    layers = [nn.Linear(a, b, bias=False, device=META) for a, b in ((H, inner), (H, inner), (inner, H))]
    gate, up, down = (layer.to(dtype) for layer in layers)

    def full() -> None:
        y = down(activation(gate(x)) * up(x))
        y.backward(torch.randn_like(y), retain_graph=True)

    return full


def swiglu(row: dict[str, Any]) -> Full:
    return gated(F.silu, row)


def geglu(row: dict[str, Any]) -> Full:
    return gated(lambda x: F.gelu(x, approximate="tanh"), row)


def lm_head(row: dict[str, Any]) -> Full:
    """Make the logits of all tokens and their loss; the gradients of both inputs are never cleared."""
    sizes = row["op_config"]
    tokens, width, dtype = sizes.get("BT") or sizes["tokens"], sizes.get("H") or sizes["D"], dtype_of(sizes["dtype"])
    x = torch.randn(tokens, width, requires_grad=True, dtype=dtype, device=META)
    target = torch.randint(sizes["V"], (tokens, 1), device=META).squeeze(1)
    heads = [nn.Linear(width, sizes["V"], bias=False, dtype=dtype, device=META) for _ in range(2)]
    head, other = heads if row["family"] == "liger-op" else (heads.pop(), None)  # Liger's has a head of its own beside

    def full(_: Any = other) -> None:
        F.cross_entropy(head(x), target).backward()

    return full


OPERATORS: dict[str, Callable[[dict[str, Any]], Full]] = {
    "rms_norm": rms_norm,
    "rope": rope,
    "cross_entropy": cross_entropy,
    "swiglu": swiglu,
    "geglu": geglu,
    "lm_head+cross_entropy": lm_head,
    "linear+cross_entropy": lm_head,
    "fused_linear_cross_entropy": lm_head,
}
