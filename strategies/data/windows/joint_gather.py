"""Gather windows of one token more and cast them once; inputs and targets are views of them; pay one gather.

Peak: the source plus one batch of B (W + 1) ids, as stored and as the step takes them (int64 in torch, int32 in JAX).
Both are gathered where the targets are not the inputs one token later in the same memory, as with ignored targets.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows.strided_view import view


def on_torch(parts: Parts) -> Parts:
    import torch

    return cast(parts, lambda ids_BW: torch.from_numpy(ids_BW.astype("int64")))


def on_jax(parts: Parts) -> Parts:
    return cast(parts, lambda ids_BW: ids_BW.astype("int32"))


def cast(parts: Parts, to_step: Callable[[Any], Any]) -> Parts:
    """Gather each batch at once, and cast it by `to_step(ids_BW)`."""

    def windows(parts: Parts, source: Source) -> Windows:
        window, stride = source.window, source.stride
        ids = source.joined
        if ids is None:
            x_NW, y_NW = view(source.inputs, window, stride), view(source.targets, window, stride)
        else:
            ids_NW = view(ids, window + 1, stride)
        parts.notes["windows"] = "inputs and targets apart" if ids is None else "one gather for both"

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            if ids is None:
                return to_step(x_NW[indices_B]), to_step(y_NW[indices_B])
            both_BW = to_step(ids_NW[indices_B])
            return both_BW[:, :-1], both_BW[:, 1:]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Holding:
    return Holding(batches=extent.batch * (extent.window + 1) * (extent.input_bytes + 8))


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_torch, "jax": on_jax}
    return [Strategy("joint_gather", rewrites=("windows",), on=on, about=__doc__, data="tokens", holds=holds)]
