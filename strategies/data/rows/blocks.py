"""Cut the rows into blocks of one window each, without overlap; pay the views that an overlap would have given.

Peak: that of the source. An epoch has window / stride times fewer windows, and the rows after the last block are in no
window. Source: the blocks that language models are usually trained on.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl


def on_any(parts: Parts) -> Parts:
    inner = parts.source

    def source(parts: Parts) -> Any:
        overlapping: Source = inner(parts)
        blocks = replace(overlapping, stride=overlapping.window)
        parts.notes.pop("unused", None)  # it counts with the other stride
        parts.notes["coverage"] = 1 - blocks.unused / len(blocks.inputs)
        return blocks

    return replace(parts, source=source)


def holds(extent: Extent) -> Holding:
    return Holding(stride=extent.window)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [
        Strategy("blocks", rewrites=("source",), on=on, about=__doc__, approximate=True, feeds="other", holds=holds)
    ]
