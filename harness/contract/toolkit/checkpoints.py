"""A checkpoint as one file in the format of safetensors: written and read a tensor at a time."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness.contract.toolkit import trees
from harness.refusal import Refusal

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of dtypes in the format."""


class Described(NamedTuple):
    """A tensor without its numbers. It lies on the `device`, or beside one on the `host`, which may be `pinned`."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: str


class Checkpoint(Protocol):
    """Where a run is saved: `begin` first, then `put` each tensor in that order; `read` fills one with what was put."""

    described: Mapping[str, Described]
    outline: Any

    def begin(self, state: Any) -> None: ...

    def put(self, name: str, array: Any) -> None: ...

    def read(self, name: str, array: Any) -> None: ...


class CheckpointFile:
    """A file of tensors. `buffer(array)` gives the bytes of an array, which can be written into."""

    def __init__(self, path: Path, buffer: Callable[[Any], memoryview]) -> None:
        self.path, self._buffer = path, buffer
        self.described: Mapping[str, Described] = {}
        self.outline: Any = None
        self._places: dict[str, int] = {}

    def begin(self, state: Any) -> None:
        """Write the header: the place of each tensor behind it, and as metadata all else of the state."""
        self.described, self.outline = described(state), outline(state)
        header: dict[str, dict[str, Any]] = {"__metadata__": {"state": json.dumps(self.outline)}}
        starts, at = {}, 0
        for name, (dtype, shape, nbytes, _) in self.described.items():
            if dtype not in DTYPES:
                raise Refusal(f"'{name}' is of {dtype}, which safetensors does not know: leave out `evaluations`")
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + nbytes]}
            starts[name] = at
            at += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._places = {name: 8 + len(text) + start for name, start in starts.items()}
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
        self.described: Mapping[str, Described] = {}
        self.outline: Any = None

    def begin(self, state: Any) -> None:
        """Remember the sizes, and all but the tensors."""
        self.described, self.outline = described(state), outline(state)

    def put(self, name: str, array: Any) -> None:
        """Write nothing."""

    def read(self, name: str, array: Any) -> None:
        """Read nothing."""


def tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """List the tensors of a state of torch by name."""
    import torch

    for name, leaf in trees.leaves(state):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf.detach()


def described(state: Any) -> dict[str, Described]:
    """Describe each tensor of a state of torch."""

    def place(leaf: Any) -> str:
        if leaf.device.type != "cpu":
            return "device"
        return "pinned" if leaf.is_pinned() else "host"

    return {
        name: Described(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), leaf.nbytes, place(leaf))
        for name, leaf in tensors(state)
    }


def outline(state: Mapping[str, Any]) -> Any:
    """Return a state of torch with the name of each tensor in its place.

    Numbers and None stay. A text belongs to the process, such as the name of a folder, and is left out.
    """
    import torch

    saved = {key: value for key, value in state.items() if not isinstance(value, str)}
    leaves = trees.leaves(saved)
    return trees.rebuilt(saved, (name if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves))


def read_one(file: Checkpoint, name: str, device: str) -> Any:
    """Read one tensor into new memory: that of a device, or of the host where the tensor lay beside the device."""
    import torch

    dtype, shape, _, place = file.described[name]
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=place == "pinned")
    file.read(name, tensor)
    return tensor.to(device) if place == "device" else tensor


def restored(file: Checkpoint, named: Mapping[str, Any]) -> Any:
    """Put a state of torch together from what a checkpoint says of it and its tensors by name."""
    state = trees.mapped(lambda leaf: named[leaf] if isinstance(leaf, str) else leaf, file.outline)
    for _, p in trees.leaves(state["params"]):
        p.requires_grad_()
    return state
