"""Fetch and stack the windows of a batch in Grain's pipeline; pay Python for every single window.

Peak: the source, the order of one epoch (8 N bytes), and a batch; with `workers` threads two batches ahead for each.
Grain's default, 16 threads and 500 elements ahead, would hold 500 batches here. Threads share the rows, but also the
interpreter's lock: for rows in memory Grain advises no threads. Source: Grain's MapDataset, batched, read through
ReadOptions.

Order and epochs come from the other parts; windows are cut here, from the rows.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl, knobs
from strategies.data.batches.torch_dataloader import refuse_other_windows

AHEAD = 2


def on_any(parts: Parts, workers: int = 0) -> Parts:
    knobs.at_least_0("grain_loader", workers=workers)

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        import grain
        import numpy as np

        source = windows.source
        refuse_other_windows("grain_loader", source)
        whole = per_epoch(source)

        def item(index: Any) -> tuple[Any, Any]:
            start = int(index) * source.stride
            stop = start + source.window
            return np.asarray(source.inputs[start:stop]), np.asarray(source.targets[start:stop])

        options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=AHEAD * workers)
        epoch, first = divmod(source.start, whole)
        while True:
            at = parts.order(parts, source, epoch)
            indices_N = np.asarray(at(first * source.batch, whole * source.batch))
            dataset = grain.MapDataset.source(indices_N).map(item).batch(source.batch)
            with closing(iter(dataset.to_iter_dataset(options))) as iterator:
                for x, y in iterator:
                    yield parts.transfer(parts, x, y)
            epoch, first = epoch + 1, 0

    return replace(parts, batches=batches)


def per_epoch(source: Source) -> int:
    """Compute the whole batches of an epoch; raise ValueError where there is none."""
    if source.count < source.batch:
        raise ValueError(
            f"the source holds {source.count} windows, fewer than one batch of {source.batch}: use a longer corpus"
        )
    return source.count // source.batch


def holds(extent: Extent, workers: int = 0) -> Holding:
    return Holding(windows=8 * extent.count, batches=AHEAD * workers * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("grain_loader", rewrites=("batches",), on=on, about=__doc__, needs=("grain",), holds=holds)]
