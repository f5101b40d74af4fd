"""Keep every window as a Python list; pay 8 bytes per slot, and 32 more per int above 256.

Peak, for tokens: n ints, plus 2 N W slots of 8 bytes: inputs and targets are slices of one list and share its ints,
where a target is the next token. Without `shared` each window has ints of its own: 2 N W (32 + 8). A frame of F
features is a list of 64 + 40 F bytes, here of float32. A negative control: many loaders are written so.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows.list_of_views import slices

LIST, SLOT, INT, FLOAT = 64, 8, 32, 32  # bytes of CPython's objects, which come in multiples of 16
SUPPOSED = "each id is counted as an int of its own, and the values decide how many are: those below 257 exist once"


def on_any(parts: Parts, shared: bool = True) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        if shared:
            x_N, y_N = map(list, of_one_list(source))
        else:
            x_N, y_N = ([view.tolist() for view in slices(rows, source)] for rows in (source.inputs, source.targets))

        def batch(indices_B: Any) -> tuple[Any, Any]:
            import numpy as np

            chosen = source.checked(indices_B).tolist()
            return np.array([x_N[index] for index in chosen]), np.array([y_N[index] for index in chosen])

        return Windows(source, batch)

    return replace(parts, windows=windows)


def of_one_list(source: Source) -> tuple[Iterator[Any], Iterator[Any]]:
    """Yield the windows of inputs, and those of targets, as slices of one list: of two, if they are no shift apart."""
    joined = source.joined
    if joined is None:
        return slices(source.inputs.tolist(), source), slices(source.targets.tolist(), source)
    rows = joined.tolist()
    return slices(rows, source), slices(rows, source, first=1)


def holds(extent: Extent, shared: bool = True) -> Holding:
    row, label, supposes = objects(extent)
    windows = extent.count * 2 * (SLOT + LIST + SLOT * extent.window)
    apart = label if extent.target_bytes else 0  # else a target is an object of the inputs
    of_rows = (row + apart) * extent.rows if shared else (row + label) * extent.count * extent.window
    return Holding(
        windows=int(windows + of_rows),
        making=SLOT * extent.rows if shared else 0,
        batches=extent.batch * extent.window * 8 * (max(1, _features(extent)) + 1),
        supposes=supposes,
    )


def objects(extent: Extent) -> tuple[float, float, str]:
    """Return the mean bytes of a row of inputs and of one of targets as objects, without slots, and the assumption.

    Labels of frames, and small tokens, are ints that CPython has anyway.
    """
    if features := _features(extent):
        return LIST + features * (SLOT + FLOAT), 0, ""
    if extent.small_ints is None:
        return INT, INT, SUPPOSED
    large = INT * (1 - extent.small_ints)
    return large, large, ""


def _features(extent: Extent) -> int:
    """Return the numbers of a frame; 0 for tokens."""
    return extent.input_bytes // 4 if extent.input_bytes > 8 else 0


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("python_lists", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
