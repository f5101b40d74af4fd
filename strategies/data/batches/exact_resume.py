"""Write the position to a file after every batch, from where a run can go on; pay under a kilobyte of disk.

Peak: nothing in memory. A batch counts as consumed when the next one is asked for, or when the iterator is closed.
After a process was killed, at most the last `every` batches come again, and none is left out. The file lies in
`folder`, by default a temporary one that is removed with the iterator. With `resume` a run begins where the file there
ends, and one of another source, order or size of windows raises an error; without, it begins anew and writes over it,
as every process of a row that is measured must, to train on the batches of the baseline. List this strategy after those
that prefetch, so that it sees what the step consumes. OLMo-core and Grain save the same few numbers.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl

NAME = "position.json"
PROBES, PROBE_ROWS = 64, 16


def fingerprint(parts: Parts, source: Source) -> dict[str, Any]:
    """Return what identifies the batches of a run: sizes, seed, and digests of some rows and of the first indices.

    Only 64 pieces of 16 rows are read, evenly spread: a change between them is not seen.
    """
    import numpy as np

    digest = hashlib.sha256()
    for rows in (source.inputs, source.targets):
        digest.update(f"{rows.shape} {rows.dtype}".encode())
        for start in np.linspace(0, max(0, len(rows) - PROBE_ROWS), PROBES).astype(int):
            digest.update(np.ascontiguousarray(rows[start : start + PROBE_ROWS]).tobytes())
    first_B = np.asarray(parts.order(parts, source, 0)(0, source.batch), np.int64)
    return {
        "source": digest.hexdigest()[:32],
        "order": hashlib.sha256(first_B.tobytes()).hexdigest()[:32],
        "seed": source.seed,
        "count": source.count,
        "window": source.window,
        "stride": source.stride,
        "batch": source.batch,
    }


def read(path: Path, run: dict[str, Any]) -> int:
    """Return how many batches were consumed; raise ValueError for the file of another run."""
    try:
        saved = json.loads(path.read_text())
        batches = saved.pop("batches")
        if type(batches) is not int or batches < 0:
            raise ValueError(batches)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path} is no position of exact_resume: remove it to begin anew") from None
    differences = [name for name in run if saved.get(name) != run[name]]
    if differences:
        name = differences[0]
        raise ValueError(
            f"{path} was written for another run: its {name} is {saved.get(name)}, here it is {run[name]}; "
            "remove it to begin anew, or name another folder"
        )
    return batches


def write(path: Path, batches: int, run: dict[str, Any]) -> int:
    """Replace the file in one step, so that the old or the new file is always whole; return its bytes."""
    text = json.dumps({"batches": batches, **run}).encode()
    partial = path.with_suffix(f".{os.getpid()}")  # ranks are processes, and all of them write
    with partial.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return len(text)


def on_any(parts: Parts, folder: str = "", every: int = 1, resume: bool = False) -> Parts:
    if every < 1:
        raise ValueError(f"exact_resume: the position cannot be written every {every} batches: set every to 1 or more")
    if resume and not folder:
        raise ValueError("exact_resume: without a folder there is no position to resume from: set folder")
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Iterator[tuple[Any, Any]]:
        source, run = windows.source, fingerprint(parts, windows.source)
        path = Path(folder, NAME) if folder else None
        start = read(path, run) if resume and path is not None and path.exists() else source.start
        flow = inner(parts, replace(windows, source=replace(source, start=start)))
        return noted(parts, flow, path, start, run)

    def noted(parts: Parts, flow: Any, path: Path | None, done: int, run: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        temporary = None if path else tempfile.mkdtemp(prefix="exact-resume-")
        path = path or Path(str(temporary), NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = -1
        try:
            for batch in flow:
                try:
                    yield batch
                finally:  # also when closed: a batch that was handed out is consumed
                    done += 1
                del batch
                if done % every == 0:
                    parts.notes["state_bytes"] = write(path, done, run)
                    written = done
        finally:
            if written != done:
                parts.notes["state_bytes"] = write(path, done, run)
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)

    return replace(parts, batches=batches)


def holds(extent: Extent, folder: str = "", every: int = 1, resume: bool = False) -> Holding:
    """Count nothing: the position lies in a file."""
    return Holding()


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "exact_resume",
            rewrites=("batches",),
            on={"torch": on_any, "jax": on_any},
            about=__doc__,
            probe={"folder": "", "resume": False},
            holds=holds,
            conflicts={
                "before hf_datasets": "the blocks have no rows by which a run is known: name it after",
                **dict.fromkeys(
                    (
                        "before preallocated_batches",
                        "before prefetch_device",
                        "before prefetch_process",
                        "before prefetch_shared",
                        "before prefetch_thread",
                        "before torch_dataloader",
                    ),
                    "it would count batches that were made ahead as trained on, and leave them out: name it after",
                ),
            },
        )
    ]
