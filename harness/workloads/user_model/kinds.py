"""Which layers of a model compute the same: those of one kind differ in the values of their parameters alone."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

OF_PLACE = ("layer_idx", "layer_id", "training")
"""Attributes of a module that say where it stands, not what it does."""
PLAIN = bool | int | float | str | tuple | list | FunctionType | BuiltinFunctionType


def kinds_of(layers: Iterable[nn.Module], labels: Sequence[str] | None = None) -> tuple[str, ...]:
    """Name the kind of each layer: by its label, with a number where there was another kind of that label before."""
    known: dict[Any, str] = {}
    kinds = []
    for at, layer in enumerate(layers):
        label = labels[at] if labels else "layer"
        mark = (label, *_marks(layer))
        if mark not in known:
            known[mark] = label if label not in known.values() else f"{label}_{len(known)}"
        kinds.append(known[mark])
    return tuple(kinds)


def _marks(layer: nn.Module) -> Iterator[Any]:
    """Yield what a layer does: its modules with their plain attributes, sizes of parameters and values of buffers."""
    for name, module in layer.named_modules():
        settings = sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if key not in OF_PLACE and not key.startswith("_") and isinstance(value, PLAIN)
        )
        yield (
            name,
            type(module),
            tuple(settings),
            tuple((key, p.shape) for key, p in module.named_parameters(recurse=False)),
            tuple((key, _digest(buffer)) for key, buffer in module.named_buffers(recurse=False)),
        )


def _digest(buffer: torch.Tensor) -> Any:
    """Return what stands for the values of a buffer; for one without values, as in a prediction, its shape."""
    if buffer.is_meta or isinstance(buffer, FakeTensor):
        return buffer.shape, buffer.dtype
    values = buffer.detach().cpu().contiguous().flatten().view(torch.uint8)
    return buffer.shape, buffer.dtype, hashlib.sha256(values.numpy().tobytes()).hexdigest()
