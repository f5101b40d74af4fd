"""A checkpoint as one file in the format of safetensors: written and read a tensor at a time."""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.contract.toolkit import trees

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
          "int8": "I8", "uint8": "U8", "uint32": "U32"}  # fmt: skip
"""The names of dtypes in the format."""
Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and the shape of each tensor, by name."""


class Checkpoint(Protocol):
    """Where a run is saved: `begin` first, then `put` each tensor in that order; `read` fills one with what was put."""

    described: Described

    def begin(self, described: Described) -> None: ...

    def put(self, name: str, array: Any) -> None: ...

    def read(self, name: str, array: Any) -> None: ...


class CheckpointFile:
    """A file of tensors. `buffer(array)` gives the bytes of an array, which can be written into."""

    def __init__(self, path: Path, buffer: Callable[[Any], memoryview]) -> None:
        self.path, self._buffer = path, buffer
        self.described: Described = {}
        self._places: dict[str, int] = {}

    def begin(self, described: Described) -> None:
        """Write the header: the place of each tensor behind it."""
        header: dict[str, dict[str, Any]] = {}
        at = 0
        for name, (dtype, shape) in described.items():
            size = _bytes_of(dtype, shape)
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.described = dict(described)
        self._places = {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in header.items()}
        with self.path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)

    def put(self, name: str, array: Any) -> None:
        """Write a tensor behind those before it."""
        with self.path.open("r+b") as file:
            file.seek(self._places[name])
            file.write(self._buffer(array))

    def read(self, name: str, array: Any) -> None:
        """Fill an array with the tensor of that name."""
        target = self._buffer(array)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._places[name])
            while target and (count := file.readinto(target)):
                target = target[count:]
        if target:
            raise EOFError(f"{self.path} ends {len(target)} bytes before '{name}' does: save it again")


class NoFile:
    """A checkpoint of a prediction: nothing is written, and what is read has the right sizes."""

    def __init__(self) -> None:
        self.described: Described = {}

    def begin(self, described: Described) -> None:
        """Remember the sizes."""
        self.described = dict(described)

    def put(self, name: str, array: Any) -> None:
        """Write nothing."""

    def read(self, name: str, array: Any) -> None:
        """Read nothing."""


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    bits = int("".join(each for each in dtype if each.isdigit()))
    return bits // 8 * math.prod(shape)


def tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """List the leaves of a state of torch by name, numbers as tensors, what is not there yet left out."""
    import torch

    for name, leaf in trees.leaves(state):
        if leaf is not None:
            yield name, leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)


def described(state: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and the shape of each tensor of a state of torch."""
    return {name: (str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)) for name, leaf in tensors(state)}


def read_one(file: Checkpoint, name: str, device: str) -> Any:
    """Read one tensor into new memory of a device."""
    import torch

    dtype, shape = file.described[name]
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    file.read(name, tensor)
    return tensor.to(device)


def restored(named: Mapping[str, Any]) -> Any:
    """Put a state of torch together from its tensors by name."""
    state = {"moments": None, **trees.nested(named)}
    for _, p in trees.leaves(state["params"]):
        p.requires_grad_()
    return {**state, "steps": int(state["steps"])}
