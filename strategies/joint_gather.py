"""Gather windows of one token more and cast them once, inputs and targets being views of them; pay one gather.

Peak: the source plus one batch of B (W + 1) ids, as stored and as the step takes them (int64 in torch, int32 in JAX).
Where the targets are not the inputs one token on, in the same memory (some are ignored, say), both are gathered.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl


def cast_to(dtype: str, parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np
        from numpy.lib.stride_tricks import sliding_window_view

        def view(rows: Any, window: int) -> Any:
            return sliding_window_view(rows, window)[:: source.stride]

        def handed(ids_BW: Any) -> Any:
            if dtype != "int64":
                return ids_BW
            import torch

            return torch.from_numpy(ids_BW)

        ids = joined(source.inputs, source.targets)
        if ids is None:
            x_NW, y_NW = view(source.inputs, source.window), view(source.targets, source.window)
        else:
            ids_NW = view(ids, source.window + 1)
        parts.notes["windows"] = "inputs and targets apart" if ids is None else "one gather for both"

        def batch(indices_B: Any) -> tuple[Any, Any]:
            if np.min(indices_B) < 0:  # numpy would count from the end
                raise IndexError(f"window {np.min(indices_B)} is outside 0 to {source.count - 1}")
            if ids is None:
                return handed(x_NW[indices_B].astype(dtype)), handed(y_NW[indices_B].astype(dtype))
            both_BW = handed(ids_NW[indices_B].astype(dtype))
            return both_BW[:, :-1], both_BW[:, 1:]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def joined(inputs: Any, targets: Any) -> Any:
    """Give the array [n + 1] of which inputs and targets are views, one row apart; None where they are not."""
    from numpy.lib.stride_tricks import as_strided

    apart = targets.ctypes.data - inputs.ctypes.data
    alike = inputs.dtype == targets.dtype and inputs.shape == targets.shape and inputs.strides == targets.strides
    if not alike or apart != inputs.strides[0]:
        return None
    return as_strided(inputs, (len(inputs) + 1, *inputs.shape[1:]), inputs.strides)


def holds(extent: Extent) -> Held:
    return Held(batches=extent.batch * (extent.window + 1) * (extent.input_bytes + 8))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": partial(cast_to, "int64"), "jax": partial(cast_to, "int32")}
    return [Strategy("joint_gather", rewrites=("windows",), on=on, about=__doc__, data="tokens", holds=holds)]
