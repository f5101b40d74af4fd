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
    """Count the objects: tokens of few values and the labels of frames are ints that CPython keeps anyway."""
    features = extent.input_bytes // 4 if extent.input_bytes > 8 else 0
    small = features or extent.input_bytes == 1 or 0 < extent.values <= KEPT_INTS
    integer = 0 if small else INT
    row = integer + (
        LIST + features * (SLOT + FLOAT) if features else integer
    )  # inputs and targets without their slots
    windows = extent.count * 2 * (SLOT + LIST + SLOT * extent.window)
    objects = row * (extent.rows if shared else extent.count * extent.window)
    return Held(
        windows=windows + objects,
        making=SLOT * extent.rows if shared else 0,
        batches=extent.batch * extent.window * 8 * (max(1, features) + 1),
        supposes=SUPPOSED if integer else "",
    )


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("python_lists", rewrites=("windows",), on=on, about=__doc__, holds=holds)]
