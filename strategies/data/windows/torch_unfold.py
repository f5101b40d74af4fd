"""Keep the source and gather each batch from torch's unfolded view of it; pay one gather, window axis last.

Peak: the source plus one batch, whose window axis is put back in place as a view. The tensor shares the memory of the
numpy rows. Source: torch `Tensor.unfold`, as in neuralforecast.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Source, Strategy, Windows, hookimpl


def on_torch(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import torch

        x_NW, y_NW = (shared(rows).unfold(0, source.window, source.stride) for rows in (source.inputs, source.targets))

        def batch(indices_B: Any) -> tuple[Any, Any]:
            at_B = torch.from_numpy(source.checked(indices_B))
            return x_NW[at_B].movedim(-1, 1), y_NW[at_B].movedim(-1, 1)

        return Windows(source, batch)

    return replace(parts, windows=windows)


def shared(rows: Any) -> Any:
    """Give a tensor over the memory of an array, which may be one that is only read, as a mapped file."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(rows)


def holds(extent: Extent) -> Held:
    """Hold nothing: the batch that is handed out is the loop's."""
    return Held()


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("torch_unfold", rewrites=("windows",), on={"torch": on_torch}, about=__doc__, holds=holds)]
