"""Keep the source and gather each batch from torch's unfolded view of it; pay one gather, window axis last.

Peak: the source plus one batch, whose window axis is moved back as a view. The tensor shares the memory of the numpy
rows. Source: torch `Tensor.unfold`, as in neuralforecast.
"""

from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl
from strategies.data.windows.strided_view import indexed


def on_torch(parts: Parts) -> Parts:
    def unfolded(rows: Any, source: Source) -> Any:
        return shared(rows).unfold(0, source.window, source.stride)

    def pick(rows_NW: Any, indices_B: Any) -> Any:
        import torch

        return rows_NW[torch.from_numpy(indices_B)].movedim(-1, 1)

    return indexed(parts, unfolded, pick)


def shared(rows: Any) -> Any:
    """Return a tensor over the memory of an array, which may be read-only, as a mapped file is."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(rows)


def flat_view(rows: Any, window: int, dtype: Any, device: str = "cpu") -> Any:
    """Return all windows of contiguous rows as a strided view [n - W + 1, W ...] on a device.

    `dtype` has the width of the rows' own; rows that are not contiguous would be read wrongly.
    """
    width = rows[0].size
    flat = shared(rows.reshape(-1).view(dtype)).to(device)
    return flat.as_strided((len(rows) - window + 1, window * width), (width, 1))


def holds(extent: Extent) -> Holding:
    """Count nothing: the batch that is handed out is the loop's."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("torch_unfold", rewrites=("windows",), on={"torch": on_torch}, about=__doc__, holds=holds)]
