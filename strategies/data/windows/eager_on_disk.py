"""Write every window to a file once and map it; pay the disk, window / stride times the source, and page faults.

Peak: the source and `block` windows while the file is written; afterwards the pages of the file in memory, at most N W
elements of inputs and of targets, which the kernel may drop. Source: shards of samples, as in MosaicML's streaming or
LitData. The file lies in `folder`, by default the system's temporary one, and has no name: it ends with the process.
"""

import os
import tempfile
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Source, Strategy, Windows, hookimpl
from strategies.data.windows.strided_view import view


def on_any(parts: Parts, block: int = 4096, folder: str = "") -> Parts:
    if block < 1:
        raise ValueError(f"eager_on_disk: a block of {block} windows is too small; give at least 1")
    if folder and not os.path.isdir(folder):
        raise ValueError(f"eager_on_disk: there is no folder '{folder}': give one that is on a disk")

    def windows(parts: Parts, source: Source) -> Windows:
        import numpy as np

        place = folder or tempfile.gettempdir()
        x_NW, y_NW = (written(rows, source, block, place) for rows in (source.inputs, source.targets))
        size = x_NW.nbytes + y_NW.nbytes
        parts.notes["file"] = f"{size:,} bytes in {place} ({file_system(place)})"

        def batch(indices_B: Any) -> tuple[Any, Any]:
            indices_B = source.checked(indices_B)
            return np.asarray(x_NW[indices_B]), np.asarray(y_NW[indices_B])

        return Windows(source, batch)

    return replace(parts, windows=windows)


def written(rows: Any, source: Source, block: int, folder: str) -> Any:
    """Write all windows of the rows to a nameless file, block by block; return it mapped, read-only.

    A full disk raises OSError here; stores into a mapped file would end the process.
    """
    import numpy as np

    windows = view(rows, source.window, source.stride)
    with tempfile.TemporaryFile(dir=folder) as file:
        for first in range(0, source.count, block):
            file.write(np.ascontiguousarray(windows[first : first + block]).data)
        file.flush()
        return np.memmap(file, rows.dtype, "r", shape=windows.shape)


def file_system(folder: str) -> str:
    """Return the file system of a folder: on tmpfs the file is memory after all."""
    import psutil

    path = os.path.realpath(folder)
    mounts = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    while path not in mounts and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return mounts.get(path, "unknown")


def holds(extent: Extent, block: int = 4096, folder: str = "") -> Holding:
    """Count the block in memory before it is written, and then the pages of the file, as if all had been read."""
    row = max(extent.input_bytes, extent.target_bytes)
    return Holding(making=min(block, extent.count) * extent.window * row, batches=extent.count * extent.window_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    on = {"torch": on_any, "jax": on_any}
    return [Strategy("eager_on_disk", rewrites=("windows",), on=on, about=__doc__, probe={"block": 3}, holds=holds)]
