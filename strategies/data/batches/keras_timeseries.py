"""Cut all windows by Keras, which keeps them as a list of arrays; pay the overlap and an object for each.

Peak: the source plus 2 N W elements and about 130 bytes for each of the 2 N arrays; while they are made, also a copy of
the rows. Source: keras.utils.timeseries_dataset_from_array with `format="grain"`, which works without TensorFlow.

Keras takes one target for each window, the target of its first row. Whole windows of targets come from a second dataset
over the targets, as in its documentation for "many-to-many". Keras shuffles once: every epoch has the same order.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl
from strategies.data.batches.grain_loader import per_epoch
from strategies.data.batches.torch_dataloader import refuse_other_windows

ARRAY = 128
"""Bytes of one array beside its elements: the object, its sizes, and its slot in the list."""
AHEAD = 2 * 500 * 1800
"""Bytes of the items that wait in Grain's two buffers of 500 windows each, without the windows themselves."""


def on_any(parts: Parts) -> Parts:
    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        import os

        os.environ.setdefault("KERAS_BACKEND", parts.place.backend)  # Keras reads it at its first import
        import keras
        import numpy as np

        source = windows.source
        refuse_other_windows("keras_timeseries", source)
        whole = per_epoch(source)

        def cut(rows: Any) -> Any:
            return keras.utils.timeseries_dataset_from_array(
                np.asarray(rows),
                None,
                source.window,
                sequence_stride=source.stride,
                batch_size=source.batch,
                shuffle=source.shuffle,
                seed=source.seed,
                format="grain",
            )

        datasets = cut(source.inputs), cut(source.targets)
        first = source.start % whole
        while True:
            for x, y in islice(zip(*datasets, strict=True), first, whole):
                yield parts.transfer(parts, np.asarray(x), np.asarray(y))
            first = 0

    return replace(parts, batches=batches)


def holds(extent: Extent) -> Holding:
    windows = extent.count * (extent.window_bytes + 2 * ARRAY)
    return Holding(windows=windows, making=extent.rows * extent.row_bytes // 2, batches=AHEAD + 2 * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "keras_timeseries",
            rewrites=("batches",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            needs=("keras", "grain"),
            feeds="reordered",
            holds=holds,
        )
    ]
