"""Keep every window within one document; pay the rows that fill no window of their document, or padding.

Peak: the source, 24 bytes for each document that has a window, and one batch; while the table of documents is made, 8
bytes for each end of a document and 40 for each document. Source: the sample index of Megatron-LM's GPTDataset, which
keeps 12 bytes for each window.

A document ends with the id `end`: 10 is the newline of the tokenizer `bytes`, so that documents are lines; set it to
the separator of the corpus. No input is an `end`, only the last target of a document. `tail` decides about the rows
that remain of a document: `drop` them, `pad` them to a window (inputs 0, targets -100), or raise an `error`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from harness import IGNORED, Extent, Holding, Parts, Source, Strategy, Windows, hookimpl

CHUNK = 1 << 20
USUAL = 40
"""The rows of a document that a prediction supposes: about a line of text."""


@dataclass(frozen=True)
class Documents(Source):
    """A source whose windows do not lie one stride apart, so that their number must be set."""

    number: int = 0

    @property
    def count(self) -> int:
        """The number of windows."""
        return self.number


def on_any(parts: Parts, end: int = 10, tail: str = "drop") -> Parts:
    if tail not in ("drop", "pad", "error"):
        raise ValueError(f"document_windows: tail is 'drop', 'pad' or 'error', not '{tail}'")

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        window, stride = source.window, source.stride
        first_D, last_D = spans(source.inputs, end)
        length_D = last_D - first_D
        number_D = counts(length_D, window, stride, pad=tail == "pad")
        covered_D = np.maximum(number_D - 1, 0) * stride + window
        uncovered_D = np.flatnonzero((number_D == 0) | (covered_D < length_D))
        if tail == "error" and len(uncovered_D):
            start, rows = int(first_D[uncovered_D[0]]), int(length_D[uncovered_D[0]])
            raise ValueError(
                f"document_windows: the document of {rows} rows at row {start} does not end with a window of {window}: "
                "set tail to 'drop' or 'pad'"
            )
        used_D = np.flatnonzero(number_D)
        if not len(used_D):
            raise ValueError(
                f"document_windows: no document has {window} rows before its id {end}: set tail to 'pad', or end"
            )
        first_D, last_D, upto_D = first_D[used_D], last_D[used_D], np.cumsum(number_D[used_D])
        # A step covers `stride` rows, or the window where that is less; the last window covers the remaining rows.
        steps_D = number_D[used_D] - 1
        rows_D = steps_D * min(stride, window) + np.minimum(window, length_D[used_D] - steps_D * stride)
        parts.notes["coverage"] = int(rows_D.sum()) / len(source.inputs)
        parts.notes["documents"] = len(used_D)
        parts.notes.pop("unused", None)  # it counts the rows after windows that lie one stride apart

        values = {field.name: getattr(source, field.name) for field in fields(source)}
        documents = Documents(**values, number=int(upto_D[-1]))

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = documents.checked(indices_B)
            document_B = np.searchsorted(upto_D, indices_B, side="right")
            before_B = np.where(document_B > 0, upto_D[document_B - 1], 0)
            starts_B = first_D[document_B] + (indices_B - before_B) * stride
            stops_B = np.minimum(starts_B + window, last_D[document_B])
            spans_B = list(zip(starts_B.tolist(), stops_B.tolist(), strict=True))
            if tail != "pad":
                both = source.inputs, source.targets
                return tuple(np.stack([np.asarray(rows[a:b]) for a, b in spans_B]) for rows in both)  # type: ignore
            x_BW = np.zeros((len(indices_B), window), source.inputs.dtype)
            y_BW = np.full((len(indices_B), window), IGNORED, np.promote_types(source.targets.dtype, np.int16))
            for row, (a, b) in enumerate(spans_B):
                x_BW[row, : b - a], y_BW[row, : b - a] = source.inputs[a:b], source.targets[a:b]
            return x_BW, y_BW

        return Windows(documents, batch)

    return replace(parts, windows=windows)


def spans(inputs: Any, end: int) -> tuple[Any, Any]:
    """Return the first row of each document and the row after its last one [D], without ends and empty documents."""
    import numpy as np

    ends = [
        start + np.flatnonzero(np.asarray(inputs[start : start + CHUNK]) == end)
        for start in range(0, len(inputs), CHUNK)
    ]
    first_D = np.concatenate([[0], *(rows + 1 for rows in ends)]).astype(np.int64)
    last_D = np.concatenate([*ends, [len(inputs)]]).astype(np.int64)
    filled_D = last_D > first_D
    return first_D[filled_D], last_D[filled_D]


def counts(length_D: Any, window: int, stride: int, pad: bool) -> Any:
    """Count the windows of each document of at least one row [D]."""
    import numpy as np

    if not pad:
        return np.maximum(0, (length_D - window) // stride + 1)
    steps_D = -(-np.maximum(0, length_D - window) // stride)
    return np.minimum(steps_D + 1, -(-length_D // stride))  # a stride beyond the window may skip the last rows


def holds(extent: Extent, end: int = 10, tail: str = "drop") -> Holding:
    documents = extent.rows // USUAL
    used = documents if tail == "pad" else min(documents, extent.rows // extent.window)
    rows = max(used, 1) * extent.window  # as many windows
    return Holding(windows=24 * used, making=48 * documents, rows=rows, stride=extent.window)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "document_windows",
            rewrites=("windows",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            probe={"tail": "pad"},
            feeds="other",
            data="tokens",
            holds=holds,
            aliases=("documents",),
            conflicts={"before streaming": "that cuts its windows out of the plain text: leave one of the two out"},
        )
    ]
