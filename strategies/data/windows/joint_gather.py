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
        from numpy.lib.stride_tricks import sliding_window_view

        def view(rows: Any, window: int) -> Any:
            return sliding_window_view(rows, window)[:: source.stride]

        def handed(ids_BW: Any) -> Any:
            if dtype != "int64":
                return ids_BW
            import torch

            return torch.from_numpy(ids_BW)

        ids = source.joined
        if ids is None:
            x_NW, y_NW = view(source.inputs, source.window), view(source.targets, source.window)
        else:
            ids_NW = view(ids, source.window + 1)
        parts.notes["windows"] = "inputs and targets apart" if ids is None else "one gather for both"

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            if ids is None:
                return handed(x_NW[indices_B].astype(dtype)), handed(y_NW[indices_B].astype(dtype))
            both_BW = handed(ids_NW[indices_B].astype(dtype))
            return both_BW[:, :-1], both_BW[:, 1:]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Held:
    return Held(batches=extent.batch * (extent.window + 1) * (extent.input_bytes + 8))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": partial(cast_to, "int64"), "jax": partial(cast_to, "int32")}
    return [Strategy("joint_gather", rewrites=("windows",), on=on, about=__doc__, data="tokens", holds=holds)]
