"""Adapters in torch."""

from dataclasses import replace
from typing import Any

import torch

from harness import Parts, tree
from strategies.adapters.lora import ADAPTERS, Sizes, chosen, deviation, of_shape, one_token, refuse_others, watched


def adapted(parts: Parts, rank: int, alpha: float, targets: str) -> Parts:
    """Freeze the model and train adapters of its matrices."""
    inner = parts.linear

    def linear(parts: Parts, p: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        y = inner(parts, p, name, x)
        adapter = p.get(ADAPTERS, {}).get(name)
        if adapter is None:
            return y
        low = x.to(adapter["a"].dtype) @ adapter["a"].T @ adapter["b"].T
        return (y + low * (alpha / rank)).to(y.dtype)

    return replace(frozen_beside(parts, rank, targets), linear=linear)


def frozen_beside(parts: Parts, rank: int, targets: str) -> Parts:
    """Freeze the model and draw adapters of its matrices, which a `linear` is to apply."""
    inner_init = parts.init

    def init(parts: Parts, source: Any = None) -> Any:
        state = inner_init(parts, source)
        refuse_others(state)
        frozen = state["params"]
        for _, leaf in tree.leaves(frozen):
            leaf.requires_grad_(False)
        layers = [
            _with_adapters(parts, f"layers.{at}", p, sizes, rank, targets)
            for at, (p, sizes) in enumerate(zip(frozen["layers"], _sizes(parts, frozen), strict=True))
        ]
        return {**state, "params": {"layers": layers}, "frozen": frozen}

    return replace(parts, init=init)


@torch.no_grad()
def _sizes(parts: Parts, params: Any) -> list[Sizes]:
    """Return the sizes of the matrices of each layer: one token is sent through them.

    Where ranks hold parts of them the sizes are those of the shape, or of whole ones without numbers.
    """
    if parts.ranks > 1 and (known := of_shape(parts)):
        return [known] * len(params["layers"])
    shape, dtype = one_token(parts)
    first = torch.zeros(shape, dtype=getattr(torch, dtype), device=parts.place.device)
    rest = {key: _whole(parts, value, key) for key, value in params.items() if key != "layers"}
    x_BTD = parts.embed(parts, rest, first)
    sizes: list[Sizes] = []
    for p in params["layers"]:
        sizes.append({})
        watching = watched(parts, sizes[-1])
        x_BTD = watching.block(watching, _whole(parts, p, "layers"), x_BTD)
    return sizes


def _whole(parts: Parts, params: Any, name: str) -> Any:
    """Return parameters of which ranks hold parts as whole ones: zeros with the memory of one row, or of one matrix."""
    if parts.ranks == 1:
        return params
    shapes = parts.shape.parameter_shapes()
    if name in shapes:
        size, dtype = shapes[name][0], (params["levels"] if isinstance(params, dict) else params).dtype
        return torch.zeros(size[max(1, len(size) - 2) :], dtype=dtype, device=parts.place.device).expand(size)
    if not isinstance(params, dict):
        return params
    return {key: _whole(parts, value, f"{name}.{key}") for key, value in params.items()}


def _with_adapters(parts: Parts, place: str, p: Any, sizes: Sizes, rank: int, targets: str) -> Any:
    """Draw the adapters of one layer, where its own parameters lie: in the layer, or in the kind that it names."""

    def drawn(name: str, shape: tuple[int, int], deviation: float) -> torch.Tensor:
        value = parts.draw(parts, f"{place}.{ADAPTERS}.{name}", shape, deviation)
        return value.to(torch.promote_types(value.dtype, torch.float32)).requires_grad_()

    adapters = {}
    for name in sorted(chosen(sizes, targets)):
        inputs, outputs = sizes[name]
        adapters[name] = {
            "a": drawn(f"{name}.a", (rank, inputs), deviation(inputs)),
            "b": drawn(f"{name}.b", (outputs, rank), -1),
        }
    kind = next(iter(p), None)
    of_kind = len(p) == 1 and kind is not None and isinstance(p[kind], dict)
    return {kind: {ADAPTERS: adapters}} if of_kind else {ADAPTERS: adapters}
