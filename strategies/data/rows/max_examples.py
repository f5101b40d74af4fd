"""Keep the rows of the first `count` windows and drop the others; pay what was in them.

Peak: the rows that so many windows cover, beside all of them while they are copied. An epoch has `count` windows. A
source of no more windows stays as it is, which is noted. Source: the option of that name in many loaders of text.
"""

from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, hookimpl


def on_any(parts: Parts, count: int = 10000) -> Parts:
    if count < 1:
        raise ValueError(f"max_examples: count is {count}: keep at least one window")
    inner = parts.source

    def source(parts: Parts) -> Source:
        whole = inner(parts)
        if whole.count <= count:
            parts.notes["unchanged"] = f"the source has {whole.count:,} windows, no more than {count:,}"
            return whole
        return replace(whole, **first_rows(whole, (count - 1) * whole.stride + whole.window))

    return replace(parts, source=source)


def first_rows(whole: Source, rows: int) -> dict[str, Any]:
    """Copy the first rows, so that the others can go; targets stay a view of the inputs where they are one."""
    import numpy as np

    if whole.joined is None:
        return {"inputs": np.array(whole.inputs[:rows]), "targets": np.array(whole.targets[:rows])}
    joined = whole.joined[: rows + 1].copy()
    return {"inputs": joined[:-1], "targets": joined[1:]}


def holds(extent: Extent, count: int = 10000) -> Holding:
    if extent.count <= count:
        return Holding()  # it stays as it is
    rows = (count - 1) * extent.stride + extent.window
    return Holding(source=rows * (extent.input_bytes + extent.target_bytes), making=extent.base, rows=rows)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "max_examples",
            rewrites=("source",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            probe={"count": 5},
            feeds="other",
            holds=holds,
            conflicts=dict.fromkeys(
                ("before mapped", "before pread", "before reservoir", "before streaming"),
                "what it keeps of the rows lies in memory: name it after",
            ),
        )
    ]
