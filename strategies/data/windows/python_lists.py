"""Keep every window as a Python list; pay 8 bytes per slot, and 32 more per int above 256.

Peak, for tokens: 2 n ints for inputs and targets, plus 2 N W slots of 8 bytes, as the windows share the ints.
Without `shared` each window has ints of its own: 2 N W (32 + 8). A frame of F features is a list of 64 + 40 F bytes,
here of float32. A negative control: many loaders are written so.
"""

from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, hookimpl
from strategies.data.windows.list_of_views import slices
from strategies.data.windows.strided_view import indexed

LIST, SLOT, INT, FLOAT = 64, 8, 32, 32  # bytes of CPython's objects, which come in multiples of 16
KEPT_INTS = 257  # CPython keeps the ints from 0 to 256, once
SUPPOSED = "each id is counted as an int of its own, and the values decide how many are: those below 257 exist once"


def on_any(parts: Parts, shared: bool = True) -> Parts:
    def lists(rows: Any, source: Source) -> list[Any]:
        if shared:
            return list(slices(rows.tolist(), source))
        return [view.tolist() for view in slices(rows, source)]

    def pick(lists_N: list[Any], indices_B: Any) -> Any:
        import numpy as np

        return np.array([lists_N[index] for index in indices_B.tolist()])

    return indexed(parts, lists, pick)


def holds(extent: Extent, shared: bool = True) -> Held:
    row, label, supposes = objects(extent)
    windows = extent.count * 2 * (SLOT + LIST + SLOT * extent.window)
    of_rows = (row + label) * (extent.rows if shared else extent.count * extent.window)
    return Held(
        windows=windows + of_rows,
        making=SLOT * extent.rows if shared else 0,
        batches=extent.batch * extent.window * 8 * (max(1, _features(extent)) + 1),
        supposes=supposes,
    )


def objects(extent: Extent) -> tuple[int, int, str]:
    """Return the bytes of a row of inputs and of one of targets as objects, without their slots, and the assumption.

    Labels of frames, and tokens of few values, are ints that CPython keeps anyway.
    """
    if features := _features(extent):
        return LIST + features * (SLOT + FLOAT), 0, ""
    if extent.input_bytes == 1 or 0 < extent.values <= KEPT_INTS:
        return 0, 0, ""
    return INT, INT, SUPPOSED


def _features(extent: Extent) -> int:
    """Return the numbers of a frame; 0 for tokens."""
    return extent.input_bytes // 4 if extent.input_bytes > 8 else 0


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("python_lists", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
