"""An operator call of torch as text, and a call like it from that text: same operator, sizes, strides and dtypes.

The values differ: numbers are drawn between a half and one, indices within every size that they could stand for.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import torch

OPAQUE = ("dtype", "layout", "memory_format", "device")
"""Arguments that are written by their kind and name; a device is always the one that the call is made for."""


def text_of(function: Any, arguments: Any, options: Any) -> str:
    """Write a call as one line of JSON; empty where it takes an argument that text cannot stand for."""
    try:
        return json.dumps([str(function), _plain(list(arguments)), _plain(dict(options))], separators=(",", ":"))
    except TypeError:
        return ""


def ready(text: str, device: str) -> Callable[[], Any]:
    """Make the arguments of a call on a device; what is returned makes the call. Raise what torch raises."""
    name, arguments, options = json.loads(text)
    namespace, packet, overload = name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    bound = min((size for shape in _shapes(arguments) for size in shape if size > 1), default=1)
    made, named = _made(arguments, device, bound), _made(options, device, bound)
    return lambda: function(*made, **named)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": [_name(value.dtype), list(value.shape), list(value.stride())]}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {"options": {name: _plain(each) for name, each in value.items()}}
    for kind in OPAQUE:
        if isinstance(value, getattr(torch, kind)):
            return {kind: _name(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} cannot be written")


def _made(value: Any, device: str, bound: int) -> Any:
    if isinstance(value, list):
        return [_made(each, device, bound) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, what),) = value.items()
    if kind == "tensor":
        dtype, shape, stride = what
        return _tensor(dtype, shape, stride, device, bound)
    if kind == "options":
        return {name: _made(each, device, bound) for name, each in what.items()}
    if kind == "device":
        return torch.device(device)
    return float(what) if kind == "float" else getattr(torch, what)


def _tensor(dtype: str, shape: list[int], stride: list[int], device: str, bound: int) -> torch.Tensor:
    """Make a tensor over as much storage as its strides reach, repeated elements once."""
    kind: torch.dtype = getattr(torch, dtype)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0
    if kind == torch.bool:
        storage = torch.ones(count, dtype=kind, device=device)
    elif kind.is_floating_point:
        storage = torch.empty(count, dtype=kind, device=device).uniform_(0.5, 1.0)
    else:
        storage = torch.randint(bound, (count,), dtype=kind, device=device)
    return storage.as_strided(shape, stride)


def _shapes(value: Any) -> list[list[int]]:
    """List the shapes of all tensors of numbers."""
    if isinstance(value, list):
        return [shape for each in value for shape in _shapes(each)]
    if isinstance(value, dict) and "tensor" in value and getattr(torch, value["tensor"][0]).is_floating_point:
        return [value["tensor"][1]]
    return []


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
