"""Keep the tokens and every window as Python lists; pay 8 bytes per slot, and 28 more per int above 256.

Peak: 2 n ints and slots for inputs and targets, plus 2 N W slots of 8 bytes: the ints are shared between the windows.
A negative control, as many loaders are written.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Source, Strategy, Windows, hookimpl


def on_any(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        inputs, targets = source.inputs.tolist(), source.targets.tolist()
        starts = range(0, source.count * source.stride, source.stride)
        xs = [inputs[start : start + source.window] for start in starts]
        ys = [targets[start : start + source.window] for start in starts]

        def batch(indices_B: Any) -> tuple[Any, Any]:
            rows = [int(index) for index in indices_B]
            return np.array([xs[row] for row in rows]), np.array([ys[row] for row in rows])

        return Windows(source, batch)

    return replace(parts, windows=windows)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("python_lists", rewrites=("windows",), on={"torch": on_any, "jax": on_any}, about=__doc__)]
