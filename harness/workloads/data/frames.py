"""Prepare frames to train on: rows of features with a label each, in two `.npy` files.

They are generated once and kept in a cache, or are somebody's own, which are checked and used where they lie:
`recording.npy` [frames, features] with its labels [frames] beside it in `recording.labels.npy`.
`python -m harness.workloads.data.frames SPEC.json` does this in a process of its own, for a parent that must not
load numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.records.task import FrameFile
from harness.workloads.data.sources import CorpusError, resolve

if TYPE_CHECKING:
    import numpy as np


GENERATED = "generated"
FORMAT = 1
CHUNK = 1 << 15  # frames drawn or checked at once
DELAY = 3
"""How many frames ago a label was to be seen: a network must look back to learn it."""


def prepare(corpus: str, root: Path, frames: int, features: int, classes: int, seed: int, cache: Path) -> FrameFile:
    """Return the frames of `corpus`: `generated`, or a `.npy` file below `root`.

    Raises CorpusError, naming file, shape and remedy, for a file that is cut short, not of little-endian floats, of
    another shape than asked for, or with values that are not finite; and for labels that are missing, of another
    length, or outside of the classes.
    """
    if corpus == GENERATED:
        return _generated(frames, features, classes, seed, cache)
    resolved = resolve(corpus, root)
    if resolved.kind != "npy":
        raise CorpusError(f"corpus {corpus!r}: frames come from a .npy file; name one, or write {GENERATED}")
    (path,) = resolved.files
    labels = path.with_suffix(".labels.npy")
    if not labels.is_file():
        raise CorpusError(f"corpus {corpus!r}: there is no {labels.name} beside it; save a label for each frame there")
    rows = _mapped(corpus, path)
    if rows.dtype.kind != "f" or rows.dtype.itemsize > 8:
        raise CorpusError(f"corpus {corpus!r}: {path} holds {rows.dtype}; save floats, rows.astype('<f4')")
    if rows.shape != (frames, features):
        raise CorpusError(
            f"corpus {corpus!r}: {path} has the shape {list(rows.shape)}, and the suite asks for "
            f"[{frames}, {features}]; set frames and features to what the file has"
        )
    _check_finite(corpus, path, rows)
    labels_N = _mapped(corpus, labels)
    _check_labels(corpus, labels, labels_N, frames, classes)
    digest, label_bytes = _digest(path, labels), labels_N.dtype.itemsize
    return FrameFile(path, labels, frames, features, classes, rows.dtype.name, digest, label_bytes)


def drawn(frames: int, features: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw frames [n, F] float32 from a normal distribution, and labels [n] int32.

    The label of a frame is the largest of the first `classes` features (taken round where there are fewer) `DELAY`
    frames earlier.
    """
    import numpy as np

    random = np.random.Generator(np.random.Philox(key=seed))
    rows_NF = np.empty((frames, features), np.float32)
    for start in range(0, frames, CHUNK):
        random.standard_normal(dtype=np.float32, out=rows_NF[start : start + CHUNK])
    labels_N = np.zeros(frames, np.int32)
    labels_N[DELAY:] = rows_NF[:-DELAY, :classes].argmax(axis=1)
    return rows_NF, labels_N


def _generated(frames: int, features: int, classes: int, seed: int, cache: Path) -> FrameFile:
    import numpy as np

    key = [FORMAT, GENERATED, frames, features, classes, seed, np.__version__]
    path = cache.absolute() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.npy"
    labels = path.with_suffix(".labels.npy")
    sidecar = path.with_suffix(".json")
    try:
        record = json.loads(sidecar.read_text())
        file = FrameFile(**record | {"path": path, "labels": labels})
        if file.digest == _digest(path, labels):
            return file
    except (OSError, ValueError, TypeError):
        pass  # not there, or not whole: made anew
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, values in zip((path, labels), drawn(frames, features, classes, seed), strict=True):
            _save(target, values)
        file = FrameFile(path, labels, frames, features, classes, "float32", _digest(path, labels))
        partial = sidecar.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(file) | {"path": path.name, "labels": labels.name}))
        partial.replace(sidecar)
    except OSError as error:
        raise CorpusError(f"corpus {GENERATED!r}: cannot write the cache {cache} ({error}); make room there") from error
    return file


def _save(path: Path, values: np.ndarray) -> None:
    import numpy as np

    partial = path.with_name(f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as out:
            np.save(out, values, allow_pickle=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _mapped(corpus: str, path: Path) -> np.ndarray:
    import numpy as np

    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a spoilt header makes numpy raise nearly anything
        raise CorpusError(
            f"corpus {corpus!r}: {path} is no complete .npy ({error}); copy it again if it was cut short"
        ) from error
    if rows.dtype.str.startswith(">"):
        raise CorpusError(
            f"corpus {corpus!r}: {path} holds big-endian values ({rows.dtype.str}); "
            f"save it anew with rows.astype('{rows.dtype.newbyteorder('<').str}')"
        )
    if rows.flags.f_contiguous and not rows.flags.c_contiguous:
        raise CorpusError(f"corpus {corpus!r}: {path} is in Fortran order; save it anew with numpy.ascontiguousarray")
    return rows


def _check_finite(corpus: str, path: Path, rows: np.ndarray) -> None:
    import numpy as np

    for start in range(0, len(rows), CHUNK):
        finite = np.isfinite(rows[start : start + CHUNK])
        if not finite.all():
            row, column = (int(at) for at in np.argwhere(~finite)[0])
            raise CorpusError(
                f"corpus {corpus!r}: {path} of shape {list(rows.shape)} has the value {rows[start + row, column]} in "
                f"frame {start + row}, feature {column}; replace or remove what is not finite"
            )


def _check_labels(corpus: str, path: Path, labels: np.ndarray, frames: int, classes: int) -> None:
    if labels.shape != (frames,):
        raise CorpusError(
            f"corpus {corpus!r}: {path} has labels of shape {list(labels.shape)} for {frames} frames; "
            "save one label for each frame"
        )
    if labels.dtype.kind not in "iu":
        raise CorpusError(f"corpus {corpus!r}: {path} holds labels of type {labels.dtype}; save integers")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise CorpusError(
            f"corpus {corpus!r}: {path} holds the label {low if low < 0 else high}, outside 0 to {classes - 1}; "
            + ("number the classes from 0" if low < 0 else f"set classes to {high + 1} or more")
        )


def _digest(path: Path, labels: Path) -> str:
    total = hashlib.sha256()
    for file in (path, labels):
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Prepare what one JSON file asks for, and print the FrameFile, or {"error": sentence} and return 2.

    The file is an object of corpus, root, frames, features, classes, seed and cache.
    """
    paths = sys.argv[1:] if arguments is None else arguments
    try:
        spec: dict[str, Any] = json.loads(Path(paths[0]).read_text())
        file = prepare(
            spec["corpus"],
            Path(spec["root"]),
            frames=spec["frames"],
            features=spec["features"],
            classes=spec["classes"],
            seed=spec["seed"],
            cache=Path(spec["cache"]),
        )
    except CorpusError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps(asdict(file), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
