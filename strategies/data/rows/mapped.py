"""Map the file of rows instead of reading it; pay page faults, and disk reads where it is not cached.

Peak: no anonymous memory. Touched pages count as resident, up to the whole file, but the kernel can take them back:
read the file pages apart from the rest. A fault also maps the cached pages around it: 64 KiB, and since Linux 6.18 the
whole folio, up to 2 MiB, so that a few hundred windows in no order can make a whole file resident. `advise` is the
access pattern that the kernel expects: `random`, `normal` or `sequential` (madvise). With `cold` the kernel is asked to
drop the file from its cache before it is mapped (posix_fadvise), so that every page comes from the disk once.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Extent, Holding, Parts, Strategy, hookimpl

AROUND = 64 << 10


def on_any(parts: Parts, advise: str = "random", cold: bool = False) -> Parts:
    if advise not in ("random", "normal", "sequential"):
        raise ValueError(f"mapped: advise is 'random', 'normal' or 'sequential', not '{advise}'")

    def rows(parts: Parts, path: Path) -> Any:
        import mmap

        import numpy as np

        if cold:
            drop(path)
        mapped: Any = np.lib.format.open_memmap(path, mode="r")
        mapped._mmap.madvise(getattr(mmap, f"MADV_{advise.upper()}"))
        return mapped

    return replace(parts, rows=rows)


def drop(path: Path) -> None:
    """Ask the kernel to drop the pages of a file from its cache; what was written to it goes to the disk first."""
    import os

    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def holds(extent: Extent, advise: str = "random", cold: bool = False) -> Holding:
    """Count the pages that are read, and those that the kernel maps around each fault: at most a folio of 2 MiB."""
    seen = extent.touched(extent.around or AROUND)
    return Holding(source=0, batches=seen, reclaimable=max(0, extent.touched(2 << 20) - seen))


@hookimpl
def harness_strategies() -> list[Strategy]:
    backends = {"torch": on_any, "jax": on_any}
    return [Strategy("mapped", rewrites=("rows",), on=backends, about=__doc__, holds=holds, alone={"cold": True})]
