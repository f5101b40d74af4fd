"""Keep every window as a Python list; pay 8 bytes per slot, and 32 more per int above 256.

Peak, for tokens: 2 n ints for inputs and targets, plus 2 N W slots of 8 bytes, as the windows share the ints.
Without `shared` each window has its own: 2 N W (32 + 8). A frame of F features is a list of 64 + 40 F bytes, here of
float32. A negative control, as many loaders are written.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl

LIST, SLOT, INT, FLOAT = 64, 8, 32, 32  # bytes of CPython's objects, which come in multiples of 16
KEPT_INTS = 257  # CPython keeps those from 0 to 256, once


def on_any(parts: Parts, shared: bool = True) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        def lists(rows: Any) -> list[Any]:
            starts = range(0, source.count * source.stride, source.stride)
            if not shared:
                return [rows[start : start + source.window].tolist() for start in starts]
            values = rows.tolist()
            return [values[start : start + source.window] for start in starts]

        xs, ys = lists(source.inputs), lists(source.targets)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            chosen = source.checked(indices_B).tolist()
            return np.array([xs[index] for index in chosen]), np.array([ys[index] for index in chosen])

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent, shared: bool = True) -> Held:
    """Count the objects: tokens of few values and the labels of frames are ints that CPython keeps anyway."""
    features = extent.input_bytes // 4 if extent.input_bytes > 8 else 0
    known = features or extent.input_bytes == 1 or 0 < extent.values <= KEPT_INTS
    fresh = 0 if known else INT
    row = fresh + (LIST + features * (SLOT + FLOAT) if features else fresh)  # inputs and targets, but for their slots
    windows = extent.count * 2 * (SLOT + LIST + SLOT * extent.window)
    objects = row * (extent.rows if shared else extent.count * extent.window)
    return Held(
        windows=windows + objects,
        making=SLOT * extent.rows if shared else 0,
        batches=extent.batch * extent.window * 8 * (max(1, features) + 1),
    )


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("python_lists", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
