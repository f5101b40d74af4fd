"""What a fork lacks of a fresh process: the pages of files that its imports mapped, and draws of its own."""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

MADV_POPULATE_READ = 22
PRESENT = 1 << 63
"""The bit of a page in /proc/self/pagemap that is mapped."""

Ranges = Sequence[tuple[int, int]]


def mapped_ranges() -> Ranges:
    """List starts and lengths in bytes of the pages of files that are mapped here, and that a fork begins without.

    Raises OSError where the kernel does not say.
    """
    import numpy as np

    page, ranges = os.sysconf("SC_PAGE_SIZE"), []
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or not fields[5].startswith("/") or "w" in fields[1] or "r" not in fields[1]:
                continue
            start, end = (int(address, 16) for address in fields[0].split("-"))
            pagemap.seek(start // page * 8)
            pages = np.frombuffer(pagemap.read((end - start) // page * 8), np.uint64) & np.uint64(PRESENT)
            edges = np.flatnonzero(np.diff(pages != 0, prepend=False, append=False))
            ranges += [(start + int(a) * page, int(b - a) * page) for a, b in edges.reshape(-1, 2)]
    return ranges


def complete(ranges: Ranges) -> None:
    """Map what a fresh process of the same imports has mapped, so that it lies in the base; draw unlike other forks."""
    madvise = ctypes.CDLL(None).madvise
    for start, length in ranges:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_READ)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all forks would draw alike where nothing is seeded
