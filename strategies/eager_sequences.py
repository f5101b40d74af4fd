"""Copy every window into an array of its own, in a list; pay the overlap and some 120 bytes per window.

Peak: the source plus N W elements for inputs and for targets, in the types of the source, plus 2 N (112 + 8) bytes
for the objects. Sequences of frames are often prepared so: 380,000 tensors [30, 287] from 380,000 frames.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl

SLOT, ARRAY, AXIS = 8, 96, 16  # bytes: in a list, of an array object, of each of its dimensions


def on_any(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        def sequences(rows: Any) -> list[Any]:
            starts = range(0, source.count * source.stride, source.stride)
            return [rows[start : start + source.window].copy() for start in starts]

        xs, ys = sequences(source.inputs), sequences(source.targets)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            chosen = [int(index) for index in indices_B]
            if min(chosen) < 0:
                raise IndexError(f"window {min(chosen)} is outside 0 to {source.count - 1}")
            return np.stack([xs[index] for index in chosen]), np.stack([ys[index] for index in chosen])

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Held:
    vectors = extent.input_bytes > 8
    return Held(windows=extent.count * (extent.window_bytes + 2 * (SLOT + ARRAY + AXIS) + AXIS * vectors))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("eager_sequences", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
