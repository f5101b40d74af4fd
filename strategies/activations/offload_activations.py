"""Keep what the backward pass needs outside of the device's memory; pay the way there and back.

On a GPU what is saved goes to page-locked host memory. On a CPU it goes to a file that is mapped into memory: its pages
count as resident while they are touched, but the kernel can take them back. A storage goes there once, however many
operators save it or a view of it, and is back from the first that reads it to the last. Storages of fewer than
`least_kib` KiB, parameters, and what functions with a backward pass of their own save of tensors without a gradient
(codes in 8 bits) stay where they are, and so does what `selective_checkpoint` or `recomputed_activation` saves of a
layer by itself; the copies of weights that autocast makes go as well. Files have no name; a `folder` in memory (tmpfs)
raises an error. torch only: in JAX offloading is a checkpoint policy without effect on a CPU.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any
from weakref import WeakValueDictionary

from harness import Parts, Strategy, hookimpl, knobs, mapped_files


@dataclass(eq=False)
class Away:
    """A copy of a storage outside of its device; it lives as long as autograd needs one of the tensors in it."""

    device: Any
    copy: Any

    @cached_property
    def back(self) -> Any:
        """Copy it to the device again."""
        return self.copy.to(self.device, non_blocking=True)


def on_torch(parts: Parts, least_kib: int = 1024, folder: str = mapped_files.FOLDER) -> Parts:
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from torch.multiprocessing.reductions import StorageWeakRef

    knobs.at_least_0("offload_activations", least_kib=least_kib)
    inner, checked = parts.grad, cache(mapped_files.check)

    def stays(tensor: Any) -> bool:
        base = tensor if tensor._base is None else tensor._base  # a transposed parameter is one still
        return bool(base.is_leaf) or tensor.untyped_storage().nbytes() < least_kib << 10

    def to_host(flat: Any) -> Any:
        return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)

    def to_file(flat: Any) -> Any:
        return mapped_files.in_torch("offload_activations", folder, flat.shape, flat.dtype).copy_(flat)

    def grad(parts: Parts, state: Any, x: Any, y: Any) -> Any:
        copied = to_host if parts.place.device == "cuda" else to_file
        if copied is to_file:
            checked("offload_activations", folder)
        moved: WeakValueDictionary[Any, Away] = WeakValueDictionary()

        def save(tensor: Any) -> Any:
            if stays(tensor):
                return tensor
            tensor = tensor.resolve_conj().resolve_neg()
            storage = tensor.untyped_storage()
            place = tensor.shape, tensor.stride(), tensor.storage_offset()
            # A dead storage leaves its number to another, but not while there is a weak reference to it.
            key = StorageWeakRef(storage), tensor.dtype, tensor._version
            if tensor._base is None and tensor.numel() * tensor.element_size() < storage.nbytes():
                # A piece of an LSTM's or a GRU's gates is no view: its version says nothing of the other pieces.
                away = moved.get((*key, *place))
                if away is None:
                    away = moved[(*key, *place)] = Away(tensor.device, copied(tensor))
                return away, (tensor.shape, away.copy.stride(), 0)
            away = moved.get(key)
            if away is None:
                flat = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                away = moved[key] = Away(tensor.device, copied(flat))
            return away, place

        def restore(saved: Any) -> Any:
            if not isinstance(saved, tuple):
                return saved
            away, place = saved
            return away.back.as_strided(*place)

        with saved_tensors_hooks(save, restore):
            return inner(parts, state, x, y)

    return replace(parts, grad=grad)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "offload_activations",
            rewrites=("grad",),
            calls=("grad",),
            on={"torch": on_torch},
            about=__doc__,
            probe={"least_kib": 1},
        )
    ]
