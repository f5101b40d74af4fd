"""Keep what the backward pass needs outside of the device's memory; pay the way there and back.

On a GPU the saved tensors go to page-locked host memory. On a CPU they go to a file that is mapped into memory: its
pages count as resident while they are touched, but the kernel can take them back. Tensors of fewer than `least_kib`
KiB, parameters, and what functions with a backward pass of their own save of tensors without a gradient (codes in 8
bits) stay where they are; what several operators save is moved for each of them. The file is unlinked as soon as it is
open. torch only: in JAX offloading is a checkpoint policy without effect on a CPU.
"""

import os
from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts, least_kib: int = 1024, folder: str = "") -> Parts:
    import tempfile

    import torch
    from torch.autograd.graph import saved_tensors_hooks

    inner = parts.grad

    def stays(tensor: Any) -> bool:
        base = tensor if tensor._base is None else tensor._base  # a transposed parameter is one still
        return bool(base.is_leaf) or tensor.numel() * tensor.element_size() < least_kib << 10

    def to_host(tensor: Any) -> Any:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def to_file(tensor: Any) -> Any:
        descriptor, path = tempfile.mkstemp(dir=folder or None, prefix="harness-saved-")
        try:
            os.ftruncate(descriptor, tensor.numel() * tensor.element_size())
            copy = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        finally:
            os.unlink(path)
            os.close(descriptor)
        return tensor.device, copy.copy_(tensor)

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        away = to_host if parts.place.device == "cuda" else to_file
        with saved_tensors_hooks(
            lambda tensor: tensor if stays(tensor) else away(tensor),
            lambda copy: copy[1].to(copy[0], non_blocking=True) if isinstance(copy, tuple) else copy,
        ):
            return inner(parts, state, x, y)

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "offload_activations",
            rewrites=("grad",),
            on={"torch": on_torch},
            about=__doc__,
            probe={"least_kib": 1},
        )
    ]
