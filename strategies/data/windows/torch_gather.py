"""Keep the source and gather each batch by the index of every row; pay 8 bytes of index per row, slow on short rows.

Peak: the source plus one batch and 8 B W bytes. The tensor shares the memory of the numpy rows. Source: advanced
indexing, `x[starts[:, None] + arange(W)]`, as in tutorials.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows.torch_unfold import shared


def on_torch(parts: Parts) -> Parts:
    def windows(parts: Parts, source: Source) -> Windows:
        import torch

        inputs, targets = shared(source.inputs), shared(source.targets)
        within_W = torch.arange(source.window)

        def batch(indices_B: Any) -> tuple[Any, Any]:
            at_BW = torch.from_numpy(source.starts(indices_B))[:, None] + within_W
            return inputs[at_BW], targets[at_BW]

        return Windows(source, batch)

    return replace(parts, windows=windows)


def holds(extent: Extent) -> Holding:
    return Holding(batches=8 * extent.batch * extent.window)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [Strategy("torch_gather", rewrites=("windows",), on={"torch": on_torch}, about=__doc__, holds=holds)]
