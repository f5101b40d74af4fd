"""What takes the place of a module of transformers, so that what it did is a part that strategies can rewrite.

A stand-in calls the part through the `parts` of the layer that is running. Attention comes through the interface of
transformers for attention functions, under a name of its own.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from harness.contract.parts import Parts
from harness.workloads.decoder._torch import shared_heads

ATTENTION = "harness"
"""The name under which the attention of the parts is known to transformers."""
EXPERTS = "harness"
"""The name under which it knows what experts do in types that its own grouped product does not take."""
Layer_ = dict[str, dict[str, Any]]


class Rest(NamedTuple):
    """What a module is called with besides its hidden states, and the shape [B, T] of those."""

    keyword: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    size: tuple[int, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, "Rest"]:
        """Separate the hidden states from the rest."""
        keyword = not args
        x = kwargs["hidden_states"] if keyword else args[0]
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return x, cls(keyword, args[1:], rest, tuple(x.shape[:2]))

    def with_states(self, x: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as before, with these hidden states."""
        if self.keyword:
            return self.args, {"hidden_states": x, **self.kwargs}
        return (x, *self.args), self.kwargs


class Running(NamedTuple):
    """The layer that is running: the parts, its parameters, and what modules of each kind are called with."""

    parts: Parts
    p: Any
    rest: dict[Any, Rest]


_running: list[Running] = []


@contextmanager
def running(parts: Parts, p: Any, rest: dict[Any, Rest]) -> Iterator[None]:
    """Let stand-ins call these parts as long as this lasts."""
    _running.append(Running(parts, p, rest))
    try:
        yield
    finally:
        _running.pop()


class StandIn(nn.Module):
    """Take the place of a module, and show its attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._instead_of = (module,)  # in a tuple, so that it is no part of this one

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_instead_of"][0], name)


class Layer(StandIn):
    """Note what a layer is called with, and pass its hidden states on."""

    def __init__(self, module: nn.Module, kind: str, returned: int) -> None:
        super().__init__(module)
        self.kind, self.returned = kind, returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, rest = Rest.of(args, kwargs)
        _running[-1].rest[self.kind] = rest
        return (x, *[None] * (self.returned - 1)) if self.returned else x


class Mix(StandIn):
    """Call `parts.mix`."""

    def __init__(self, module: nn.Module, returned: int) -> None:
        super().__init__(module)
        self.returned = returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts, p, known = _running[-1]
        x, known[next(iter(p)), "mix"] = Rest.of(args, kwargs)
        return (parts.mix(parts, p, x), *[None] * (self.returned - 1))


class Feed(StandIn):
    """Call `parts.feed`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts, p, _ = _running[-1]
        return parts.feed(parts, p, x)


class Linear(StandIn):
    """Call `parts.linear`."""

    def __init__(self, module: nn.Module, name: str, transposed: bool) -> None:
        super().__init__(module)
        self.name, self.transposed = name, transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts, p, _ = _running[-1]
        own = next(iter(p.values()))
        weight, bias = own[f"{self.name}.weight"], own.get(f"{self.name}.bias")
        if isinstance(weight, torch.Tensor):  # by the names that the matrices of a layer have elsewhere, too: [in, out]
            own = {**own, self.name: weight if self.transposed else weight.T}
            own |= {} if bias is None else {f"b{self.name}": bias}
        return parts.linear(parts, own, self.name, x)


def linear(transposed: frozenset[str], parts: Parts, p: dict[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiply by a matrix of a layer: [out, in], or [in, out] where it is `transposed`."""
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    return F.linear(x, weight.T if name in transposed else weight, bias)


def replace_linear(layer: nn.Module, aside: Collection[str]) -> list[str]:
    """Let stand-ins make the matrix products of a layer, but those aside; return the names of matrices [in, out]."""
    from transformers.pytorch_utils import Conv1D

    plain = (nn.Linear.forward, Conv1D.forward)  # a subclass may return something else than a product
    modules = {name: module for name, module in layer.named_modules() if name not in aside}
    products = {name: module for name, module in modules.items() if type(module).forward in plain}
    transposed = [name for name, module in products.items() if isinstance(module, Conv1D)]
    for name, module in products.items():
        layer.set_submodule(name, Linear(module, name, name in transposed))
    return transposed


def register() -> None:
    """Make the attention of the parts known to transformers, with the masks that torch's own takes, and the experts."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, mask)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)


def experts(module: nn.Module, x_ND: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    """Multiply by the matrices of each token's experts as transformers does, in one grouped product.

    torch has none in float64, so that there, for the reference of answers, each token's matrices are gathered.
    """
    from transformers.integrations import moe

    product = moe.batched_mm_experts_forward if x_ND.dtype == torch.float64 else moe.grouped_mm_experts_forward
    return product(module, x_ND, *routing)


def mask(*, kv_length: int, local_size: int | None = None, **others: Any) -> torch.Tensor | None:
    """Return the mask [B, 1, T, T] of rows without padding; None where it is causal and nothing else.

    So does transformers where it can read positions, but for a window of just the row's length, which hides nothing. On
    tensors without data it cannot rule out that a row holds several texts, and would make a mask that no run has.
    """
    from transformers.masking_utils import sdpa_mask

    if local_size is None or kv_length <= local_size:
        return None
    return sdpa_mask(kv_length=kv_length, local_size=local_size, **others)


def attention(
    module: nn.Module,
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by `parts.attend` where attention is causal and nothing else; what has a window, a cap or sinks by itself.

    A strategy that lays documents end to end has `parts.attend` tell them apart. Here it is done by their positions.
    """
    K = q_BHTK.shape[-1]
    scaling = K**-0.5 if scaling is None else scaling
    parts = _running[-1].parts
    if attention_mask is None and not softcap and s_aux is None:
        factor = scaling * K**0.5  # `attend` scales by the root of the width
        q_BHTK = q_BHTK if abs(factor - 1) < 1e-6 else q_BHTK * factor
        return parts.attend(parts, *(each.transpose(1, 2) for each in (q_BHTK, k_BGTK, v_BGTK))), None

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if softcap or s_aux is not None:
            return written_out(q, k, v, mask, scaling, softcap, s_aux)
        k, v, grouped = shared_heads(parts.place, q, k, v, masked=True)
        y_BHTK = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=grouped)
        return y_BHTK.transpose(1, 2).contiguous()

    if parts.positions is None:
        return attended(q_BHTK, k_BGTK, v_BGTK, attention_mask), None
    lengths = [each.stop - each.start for each in parts.positions(parts, q_BHTK.shape[2])]
    masks = [None] * len(lengths) if attention_mask is None else _diagonal(attention_mask, lengths)
    documents = zip(*(each.split(lengths, 2) for each in (q_BHTK, k_BGTK, v_BGTK)), masks, strict=True)
    return torch.cat([attended(*each) for each in documents], 1), None


def _diagonal(mask: torch.Tensor, lengths: list[int]) -> list[torch.Tensor | None]:
    """Return of a mask [B, 1, T, T] what each of several texts in a row sees of itself."""
    bands = mask.split(lengths, 2)
    return [band.split(lengths, 3)[at] for at, band in enumerate(bands)]


def written_out(
    q_BHTK: torch.Tensor,
    k_BGTK: torch.Tensor,
    v_BGTK: torch.Tensor,
    mask_TT: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with all scores at once: bent to stay within a cap (Gemma 2, arXiv:2408.00118), or beside sinks.

    A sink is a score of each head that takes its share of the softmax and gives no value (GPT-OSS, arXiv:2508.10925).
    """
    groups = q_BHTK.shape[1] // k_BGTK.shape[1]
    k, v = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (k_BGTK, v_BGTK))
    scores = q_BHTK @ k.transpose(2, 3) * scaling
    if softcap:
        scores = scores / softcap
        scores = torch.tanh(scores)
        scores = softcap * scores
    if mask_TT is None:
        mask_TT = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask_TT, torch.finfo(scores.dtype).min)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    return (shares[..., : k.shape[2]] @ v).transpose(1, 2).contiguous()
