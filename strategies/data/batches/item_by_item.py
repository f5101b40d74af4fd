"""Fetch every window of a batch by a call of its own and collate them, as map-style datasets do; pay Python per window.

Peak: two batches: the windows in a list, and the batch that they are stacked into. This is `__getitem__` and
`default_collate` of torch's DataLoader without its worker processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl

Batches = Iterator[tuple[Any, Any]]


class Items:
    """A map-style dataset: its length, and one window with its targets."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        import numpy as np

        if not 0 <= index < len(self):
            raise IndexError(f"there is no window {index}: there are {len(self)}")
        x_1T, y_1T = self.windows.batch(np.array([index]))
        if self.windows.lasts is None:
            return x_1T[0], y_1T[0]
        return tuple(a[0].clone() if hasattr(a, "clone") else a[0].copy() for a in (x_1T, y_1T))


def collated(items: list[tuple[Any, Any]], stack: Callable[[list[Any]], Any]) -> tuple[Any, Any]:
    """Stack inputs and targets of single windows into a batch."""
    import numpy as np

    def together(arrays: list[Any]) -> Any:
        return np.stack(arrays) if isinstance(arrays[0], np.ndarray | np.generic) else stack(arrays)

    xs, ys = zip(*items, strict=True)
    return together(list(xs)), together(list(ys))


def itemised(parts: Parts, stack: Callable[[list[Any]], Any]) -> Parts:
    """Fetch windows one by one, and collate those on a device by `stack`."""
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Batches:
        items = Items(windows)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            return collated([items[int(index)] for index in indices_B], stack)

        return inner(parts, Windows(windows.source, batch))

    return replace(parts, batches=batches)


def on_torch(parts: Parts) -> Parts:
    import torch

    return itemised(parts, torch.stack)


def on_jax(parts: Parts) -> Parts:
    import jax.numpy as jnp

    return itemised(parts, jnp.stack)


def holds(extent: Extent) -> Holding:
    """Count nothing: the batch that is put together is counted already."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "item_by_item", rewrites=("batches",), on={"torch": on_torch, "jax": on_jax}, about=__doc__, holds=holds
        )
    ]
