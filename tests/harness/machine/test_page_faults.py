"""What a page fault maps of a file is what random windows then find resident."""

import mmap
import random
from pathlib import Path

import psutil
import pytest

from harness.contract.data import Extent
from harness.machine import page_faults

MIB = 1 << 20


def resident(path: Path) -> int:
    return sum(each.rss for each in psutil.Process().memory_maps() if each.path == str(path))


@pytest.mark.parametrize("piece", [64 << 10, 1 << 20, 64 << 20])
def test_windows_in_no_order_make_resident_what_faults_do(piece: int, tmp_path: Path) -> None:
    path, size, window = tmp_path / "rows", 64 * MIB, 32 << 10
    with path.open("wb") as file:
        for _ in range(size // piece):
            file.write(bytes(piece))
            file.flush()
    extent = Extent(size // 1024, 1024, 0, window // 1024, 1, batch=16, steps=4, in_order=False)
    around = page_faults.around(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        places = random.Random(1)
        for _ in range(extent.steps * extent.batch):
            start = places.randrange(size - window)
            for at in range(start, start + window, mmap.PAGESIZE):
                mapped[at]
        measured = resident(path)
    expected = extent.touched(around)
    assert 0.75 * measured <= expected <= 1.25 * measured, (around, measured / MIB, expected / MIB)


def test_a_file_without_a_byte_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "none").touch()
    with pytest.raises(ValueError, match="empty"):
        page_faults.around(tmp_path / "none")
