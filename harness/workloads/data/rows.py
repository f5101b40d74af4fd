"""Rows on the host: files of them as a source, plain windows over a source, and batches of windows in order.

Everything here is numpy and works for token ids as for frames; each workload hands the batches to its device.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from harness.contract.data import IGNORED, SMALL_INTS, Extent, Source, Windows
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.workloads.data import frames

BLOCK, BLOCKS = 1 << 12, 1 << 8  # ids of a block, and the blocks that are read of a file to know its values


def data_parts(shape: Any, place: Place, corpus: Any, source: Callable[[Parts], Source]) -> Parts:
    """Build the untouched parts of data, which all workloads share; the others are absent."""
    return Parts(
        shape, place, corpus=corpus, rows=read_rows, source=source, windows=plain_windows, order=order, batches=batches
    )


def read_rows(parts: Parts, path: Path) -> Any:
    """Read the rows of a `.npy` file into memory, straight into the array that is returned."""
    with Path(path).open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def token_source(parts: Parts, seed: int) -> Source:
    """Open the ids of the corpus, or of a file of Zipf-distributed ones where there is none.

    Inputs and targets are two views of one array [n], one id apart.
    """
    shape = parts.shape
    path = parts.corpus.path if parts.corpus is not None else _drawn_ids_file(_drawn_rows(shape), shape, seed)
    ids_N = parts.rows(parts, path)
    source = Source(
        ids_N[:-1],
        masked(ids_N[1:], shape.ignored, seed),
        shape.tokens,
        shape.step,
        shape.batch,
        seed=seed,
        shuffle=shape.shuffle,
        vocabulary=shape.vocabulary,
    )
    return with_note(parts, source)


def masked(targets_N: Any, share: float, seed: int) -> Any:
    """Return targets of which a share, drawn from a seed, carries no loss; a share of 0 gives them as they are."""
    if not share:
        return targets_N
    hidden = np.random.Generator(np.random.Philox(key=seed + 1)).random(len(targets_N)) < share
    return np.where(hidden, IGNORED, np.asarray(targets_N).astype(np.int32)).astype(np.int32)


def token_extent(shape: Any, corpus: Any, steps: int) -> Extent:
    """Return the sizes of a source of token ids: the targets are a view of the inputs unless some are ignored."""
    rows = corpus.tokens if corpus is not None else _drawn_rows(shape)
    item = np.dtype(corpus.dtype).itemsize if corpus is not None else 4
    return Extent(
        rows - 1,
        item,
        4 if shape.ignored else 0,
        shape.tokens,
        shape.step,
        shape.batch,
        steps,
        values=shape.vocabulary,
        small_ints=small_ints(shape, corpus),
    )


def small_ints(shape: Any, corpus: Any) -> float | None:
    """Return the share of ids below SMALL_INTS: of those in the file of a corpus, or of those that are drawn.

    Of a long file blocks that lie evenly over it are read; None where there is no file to read.
    """
    if 0 < shape.vocabulary <= SMALL_INTS:
        return 1.0
    if corpus is None:
        weights = 1.0 / np.arange(1, shape.vocabulary + 1)
        return float(weights[:SMALL_INTS].sum() / weights.sum())
    try:
        ids_N = np.load(corpus.path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    blocks = np.linspace(0, max(0, len(ids_N) - BLOCK), BLOCKS).astype(int)
    starts = blocks if len(ids_N) > BLOCK * BLOCKS else np.arange(0, len(ids_N), BLOCK)
    return float(np.mean(np.concatenate([ids_N[start : start + BLOCK] < SMALL_INTS for start in starts])))


def frame_source(parts: Parts, seed: int) -> Source:
    """Open the frames [n, F] of the corpus and their labels [n], or files of drawn ones where there is none."""
    shape = parts.shape
    paths = (parts.corpus.path, parts.corpus.labels) if parts.corpus is not None else _drawn_frames_files(shape, seed)
    frames_NF, labels_N = (parts.rows(parts, path) for path in paths)
    source = Source(frames_NF, labels_N, shape.window, shape.stride, shape.batch, seed=seed, shuffle=shape.shuffle)
    return with_note(parts, source)


def frame_extent(shape: Any, corpus: Any, steps: int) -> Extent:
    """Return the sizes of a source of frames and their labels."""
    item, label = (np.dtype(corpus.dtype).itemsize, corpus.label_bytes) if corpus is not None else (4, 4)
    return Extent(shape.frames, item * shape.features, label, shape.window, shape.stride, shape.batch, steps)


def with_note(parts: Parts, source: Source) -> Source:
    """Note the rows that no window covers, if any."""
    if source.unused:
        share = source.unused / len(source.inputs)
        parts.notes["unused"] = f"{source.unused:,} of {len(source.inputs):,} rows ({share:.2%}) lie in no window"
    return source


def _drawn_rows(shape: Any) -> int:
    return shape.tokens + shape.step * (4 * shape.batch - 1) + 1


def drawn_ids(rows: int, vocabulary: int, seed: int) -> Any:
    """Draw ids [rows] with probability falling as 1 / (rank + 1), from a seed alone."""
    weights = 1.0 / np.arange(1, vocabulary + 1)
    uniform = np.random.Generator(np.random.Philox(key=seed)).random(rows)
    return np.searchsorted(np.cumsum(weights) / weights.sum(), uniform).clip(0, vocabulary - 1).astype(np.int32)


def _drawn_ids_file(rows: int, shape: Any, seed: int) -> Path:
    return drawn_file(f"ids-{rows}-{shape.vocabulary}-{seed}", lambda: drawn_ids(rows, shape.vocabulary, seed))


def _drawn_frames_files(shape: Any, seed: int) -> tuple[Path, Path]:
    name = f"{shape.frames}-{shape.features}-{shape.classes}-{seed}"
    drawn = cache(lambda: frames.drawn(shape.frames, shape.features, shape.classes, seed))
    return drawn_file(f"frames-{name}", lambda: drawn()[0]), drawn_file(f"labels-{name}", lambda: drawn()[1])


def drawn_file(name: str, draw: Callable[[], Any]) -> Path:
    """Keep drawn rows in a `.npy` file for the life of this process, so that they are opened like any others."""
    path = _drawn_folder() / f"{name}.npy"
    if not path.exists():
        np.save(path, draw())
    return path


@cache
def _drawn_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="harness-drawn-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def plain_windows(parts: Parts, source: Source) -> Windows:
    """Slice each window of a batch from the source when it is asked for; keep nothing."""

    def batch(indices_B: Any) -> tuple[Any, Any]:
        starts = source.starts(indices_B).tolist()
        x = np.stack([source.inputs[s : s + source.window] for s in starts])
        y = np.stack([source.targets[s : s + source.window] for s in starts])
        return x, y

    return Windows(source, batch)


def order(parts: Parts, source: Source, epoch: int) -> Callable[[int, int], Any]:
    """Keep the windows in their order, or where the source asks for it in a random permutation of each epoch."""
    count = source.count
    if not source.shuffle:
        return lambda start, stop: np.arange(start, min(stop, count))
    order_N = np.arange(count, dtype=np.uint32 if count <= 1 << 32 else np.int64)
    np.random.Generator(np.random.PCG64(np.random.SeedSequence([source.seed, epoch]))).shuffle(order_N)
    return lambda start, stop: order_N[start:stop]


def per_epoch(source: Source) -> int:
    """Count the batches of one epoch, the ragged last one dropped.

    Raises ValueError when the source does not hold a single batch.
    """
    if source.count < source.batch:
        raise ValueError(
            f"the source holds {source.count} windows, fewer than one batch of {source.batch}: use a longer corpus"
        )
    return source.count // source.batch


def indices(parts: Parts, source: Source) -> Iterator[Any]:
    """Yield the window indices [B] of one batch after another, epoch after epoch, from `source.start` on."""
    batch, whole = source.batch, per_epoch(source)
    epoch, first = divmod(source.start, whole)
    while True:
        at = parts.order(parts, source, epoch)
        for number in range(first, whole):
            yield at(number * batch, (number + 1) * batch)
        del at  # or the next permutation is made beside this one
        epoch, first = epoch + 1, 0


def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
    """Gather one batch after another and hand it to the device; hold nothing but the newest."""
    for indices_B in indices(parts, windows.source):
        yield parts.transfer(parts, *windows.batch(indices_B))
