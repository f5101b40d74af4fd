"""How much of a mapped file one page fault makes resident: the kernel decides, so the file itself is tried.

It maps the cached pages around a fault (64 KiB on most machines), and since Linux 6.18 all of the folio that they lie
in, whose size follows from how the file was written and from the memory that was free then.
"""

import mmap
import random
from pathlib import Path

import psutil

TOUCHED = 64
"""Places that are touched; each that is not cached is read from the disk."""


def around(path: Path) -> int:
    """Return the bytes around a place that are mapped when it is touched, in the mean over random places of a file.

    Raises OSError where it cannot be read, ValueError where it is empty.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        places = random.Random(0)
        for _ in range(TOUCHED):
            mapped[places.randrange(len(mapped))]
        share = min(1.0, _resident(path) / len(mapped))
        return max(mmap.PAGESIZE, int(len(mapped) * (1 - (1 - share) ** (1 / TOUCHED))))


def _resident(path: Path) -> int:
    """Return the bytes of a file that are in the memory of this process."""
    name = str(path.resolve())
    return sum(each.rss for each in psutil.Process().memory_maps(grouped=True) if each.path == name)
