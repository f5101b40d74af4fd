"""Group token documents into blocks with Hugging Face datasets; pay a copy on disk and the tail of each map batch.

Peak: about 80 bytes for each row of one map batch (`examples` documents of `document` rows), while blocks are made as
lists of ints; then one batch. The copy lies in Arrow files that are mapped. Source: `group_texts` of the
language-modelling examples of Transformers (run_clm.py).

There is no overlap: blocks of one window each replace the windows of the source. The stream is divided into documents
of `document` rows, and the rows after the last block of a map batch are dropped. The labels are the targets, which are
shifted already. The files lie in a temporary folder until the batches are closed.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.batches.torch_dataloader import refuse_other_windows

LISTED = 80
"""Bytes of one row in the lists of a map batch: slots, and ints, of both columns."""


def on_any(parts: Parts, document: int = 1000, examples: int = 1000) -> Parts:
    if document < 1 or examples < 1:
        raise ValueError(f"hf_datasets: document and examples are at least 1, not {document} and {examples}")
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        from tempfile import TemporaryDirectory

        source = windows.source
        refuse_other_windows("hf_datasets", source)
        with TemporaryDirectory(prefix="hf-datasets-") as folder:
            blocks = grouped(source, folder, document, examples)
            if not len(blocks):
                raise ValueError(f"hf_datasets: no map batch holds a block of {source.window} rows: raise examples")
            parts.notes["coverage"] = len(blocks) * source.window / len(source.inputs)

            def batch(indices_B: Any) -> tuple[Any, Any]:
                columns = blocks[indices_B.tolist()]
                return columns["input_ids"], columns["labels"]

            numbered = range(len(blocks))  # each block is a row: order and epochs need only their number
            yield from inner(
                parts, Windows(replace(source, inputs=numbered, targets=numbered, window=1, stride=1), batch)
            )

    return replace(parts, batches=batches)


def grouped(source: Source, folder: str, document: int, examples: int) -> Any:
    """Write the documents of a source into Arrow files, group them into blocks, and return the blocks."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at the first import; nothing is downloaded
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    columns = {"input_ids": source.inputs, "labels": source.targets}
    kinds = {name: datasets.Sequence(datasets.Value(str(rows.dtype))) for name, rows in columns.items()}

    def documents() -> Iterator[dict[str, Any]]:
        for start in range(0, len(source.inputs), document):
            yield {name: np.asarray(rows[start : start + document]) for name, rows in columns.items()}

    def group_texts(batch: dict[str, Any]) -> dict[str, Any]:
        joined = {name: list(chain(*batch[name])) for name in columns}
        total = len(joined["input_ids"]) // source.window * source.window
        return {
            name: [ids[start : start + source.window] for start in range(0, total, source.window)]
            for name, ids in joined.items()
        }

    # Without fingerprints, datasets would hash all rows.
    texts: Any = datasets.Dataset.from_generator(
        documents, features=datasets.Features(kinds), cache_dir=folder, fingerprint="documents"
    )
    blocks = texts.map(group_texts, batched=True, batch_size=examples, new_fingerprint="blocks")
    return blocks.with_format("numpy")


def holds(extent: Extent, document: int = 1000, examples: int = 1000) -> Holding:
    return Holding(making=LISTED * min(extent.rows, document * examples), batches=extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "hf_datasets",
            rewrites=("batches",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            approximate=True,
            needs=("datasets",),
            probe={"document": 50, "examples": 3},
            feeds="other",
            data="tokens",
            holds=holds,
            conflicts=dict.fromkeys(
                ("grain_loader", "keras_timeseries", "prefetch_process", "prefetch_shared", "torch_dataloader"),
                "it cuts the windows from the rows itself, and they would not be these blocks",
            ),
        )
    ]
