"""Gather all batches of an epoch into a list first, then hand them out; pay every window of the epoch at once.

Peak: N windows, the epoch. The list serves every epoch as long as the order stays the same; where the order changes, it
is dropped and gathered again. Keras' `timeseries_dataset_from_array` keeps such a list in its Grain format.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl


def on_any(parts: Parts) -> Parts:
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        source = windows.source
        whole = max(1, source.count // source.batch)
        on_host = replace(parts, transfer=unchanged if windows.lasts is None else copied)
        epoch, first = divmod(source.start, whole)
        while True:
            from_start = replace(windows, source=replace(source, start=epoch * whole))
            gathered = list(islice(inner(on_host, from_start), whole))
            same = True
            while same:
                for x, y in gathered[first:]:
                    yield parts.transfer(parts, x, y)
                same, epoch, first = in_the_same_order(parts, windows, epoch), epoch + 1, 0
            x = y = None
            del gathered  # before the next epoch is gathered: one at a time

    return replace(parts, batches=batches)


def unchanged(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
    """Return a batch as it is, on the host."""
    return x, y


def copied(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
    """Copy a batch whose memory a later batch uses again."""
    return tuple(a.clone() if hasattr(a, "clone") else a.copy() for a in (x, y))


def in_the_same_order(parts: Parts, windows: Windows, epoch: int) -> bool:
    """Return whether the next epoch takes the windows in the same order as this one."""
    source = windows.source
    these, those = (parts.order(parts, source, number) for number in (epoch, epoch + 1))
    starts = range(0, source.count - source.batch + 1, source.batch)
    return all((these(start, start + source.batch) == those(start, start + source.batch)).all() for start in starts)


def holds(extent: Extent) -> Holding:
    """Count the batches of an epoch."""
    return Holding(batches=extent.count // extent.batch * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("preallocated_batches", rewrites=("batches",), on=on, about=__doc__, holds=holds)]
