"""Fetch each window as one item and collate them in torch's DataLoader; pay Python for every single window.

Peak: the source and one batch (items are views of the rows). With `workers` processes: 1 + workers times the source,
inputs and targets apart even where they were views of one array, and two batches ahead for each. Source:
torch.utils.data.DataLoader over a map-style dataset, as its documentation shows it.

Order and epochs come from the other parts, as a batch sampler; windows are cut here, from the rows. The processes are
spawned and receive the rows, since a process with threads (of torch or of JAX) cannot be forked safely. They stay over
all epochs, and end when the batches are closed.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl, knobs

AHEAD = 2
"""The batches that each worker makes before they are asked for: torch's own default."""


@dataclass(frozen=True)
class WindowDataset:
    """A map-style dataset of torch: one window for one index."""

    source: Source

    def __len__(self) -> int:
        return self.source.count

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        import numpy as np

        def cut(rows: Any) -> Any:
            start = int(index) * self.source.stride
            window = np.asarray(rows[start : start + self.source.window])
            return window if window.flags.writeable else window.copy()  # torch warns of read-only memory

        return cut(self.source.inputs), cut(self.source.targets)


def on_any(parts: Parts, workers: int = 0) -> Parts:
    knobs.at_least_0("torch_dataloader", workers=workers)
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        import torch
        from torch.utils.data import DataLoader

        source = windows.source
        refuse_other_windows("torch_dataloader", source)
        with closing(in_order(parts, inner, source)) as sampler:
            dataset: Any = WindowDataset(source)
            loader: Any = DataLoader(
                dataset,
                batch_sampler=sampler,
                num_workers=workers,
                multiprocessing_context="spawn" if workers else None,
                prefetch_factor=AHEAD if workers else None,
                generator=torch.Generator(),  # else it draws from torch's own, and changes the numbers drawn later
            )
            iterator = iter(loader)
            try:
                for x, y in iterator:
                    yield parts.transfer(parts, x.numpy(), y.numpy())
            finally:
                del iterator  # ends the workers

    return replace(parts, batches=batches)


def refuse_other_windows(name: str, source: Source) -> None:
    """Raise ValueError for a source whose windows do not lie one stride apart."""
    if type(source) is not Source:
        raise ValueError(f"{name} cuts windows of a fixed stride: leave out the strategy that picks others")


def in_order(parts: Parts, inner: Any, source: Source) -> Any:
    """Yield the indices [B] of each batch: the inner batches, of windows that are their own index.

    Raises ValueError where the inner batches are of other windows than they are asked for.
    """
    bare = replace(parts, transfer=lambda parts, x, y: (x, y))
    for indices_B, _ in inner(bare, Windows(source, lambda indices_B: (indices_B, indices_B))):
        if indices_B.shape != (source.batch,):
            raise ValueError("two strategies of batches cut the windows, each by itself: leave one of the two out")
        yield indices_B


def holds(extent: Extent, workers: int = 0) -> Holding:
    """Count the memory of this process; each worker process holds the rows and some batches besides."""
    return Holding(making=extent.rows * extent.row_bytes if workers else 0)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("torch_dataloader", rewrites=("batches",), on=on, about=__doc__, needs=("torch",), holds=holds)]
