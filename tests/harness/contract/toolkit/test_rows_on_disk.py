"""Rows on disk give the same values as the array in memory, and hold none of it."""

import gc
import os
import pickle
import tracemalloc

import numpy as np
import pytest

from harness.contract.toolkit import rows_on_disk
from harness.contract.toolkit.rows_on_disk import RowsOnDisk


@pytest.fixture(params=["uint16", "float32"])
def rows(request, tmp_path):
    random = np.random.Generator(np.random.Philox(key=0))
    shape = (1000,) if request.param == "uint16" else (1000, 7)
    values = (random.random(shape) * 60_000).astype(request.param)
    np.save(tmp_path / "rows.npy", values)
    return values, RowsOnDisk(tmp_path / "rows.npy")


def test_every_slice_reads_what_the_array_has(rows):
    values, on_disk = rows
    assert (on_disk.shape, on_disk.dtype, on_disk.ndim, len(on_disk)) == (values.shape, values.dtype, values.ndim, 1000)
    assert on_disk.row_bytes == values[0].nbytes
    for part in (slice(None), slice(1, None), slice(None, -1), slice(5, 9), slice(990, 2000), slice(7, 7), slice(9, 3)):
        assert np.array_equal(np.asarray(on_disk[part]), values[part])
        assert np.array_equal(np.asarray(on_disk[1:][part][1:]), values[1:][part][1:])
    assert np.array_equal(np.asarray(on_disk, np.float64), values.astype(np.float64))


def test_pickled_rows_are_those_of_the_file_wherever_they_are_opened(rows):
    values, on_disk = rows
    whole, part = pickle.loads(pickle.dumps([on_disk, on_disk[5:][:9]]))
    assert np.array_equal(np.asarray(whole), values) and np.array_equal(np.asarray(part), values[5:14])
    assert whole._file not in (on_disk._file, part._file)


def test_rows_are_read_into_an_array_that_is_there(rows):
    values, on_disk = rows
    out = np.empty((4, *values.shape[1:]), values.dtype)
    for source in (on_disk, values):
        out[:] = 0
        rows_on_disk.fill(out, source[3:7])
        assert np.array_equal(out, values[3:7])


def test_pieces_cover_all_rows(rows):
    values, on_disk = rows
    found = list(rows_on_disk.in_pieces(on_disk, size=999))
    assert len(found) > 1 and found[0][0] == 0
    assert np.array_equal(np.concatenate([piece for _, piece in found]), values)


def test_a_view_holds_no_rows_and_keeps_the_file_open(rows, tmp_path):
    values, on_disk = rows
    view = on_disk[10:20]
    del on_disk
    gc.collect()
    (tmp_path / "rows.npy").unlink()
    assert np.array_equal(np.asarray(view), values[10:20])
    tracemalloc.start()
    try:
        again = view[2:]
        assert tracemalloc.get_traced_memory()[1] < 4096
    finally:
        tracemalloc.stop()
    assert len(again) == 8


def test_files_are_closed(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(10))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        RowsOnDisk(tmp_path / "rows.npy")[2:4]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_steps_and_lists_of_indices_are_refused(rows):
    _, on_disk = rows
    for wrong in (slice(0, 9, 2), 3, np.array([1, 2])):
        with pytest.raises(TypeError, match="read in slices without a step"):
            on_disk[wrong]


def test_a_file_that_was_cut_short_is_refused_when_opened_and_when_read(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(1000))
    rows = RowsOnDisk(path)
    os.truncate(path, 4000)
    with pytest.raises(EOFError, match="bytes before its last row"):
        np.asarray(rows)
    with pytest.raises(ValueError, match=r"rows\.npy has \d+ bytes of rows, not the 8000"):
        RowsOnDisk(path)
    np.save(path, np.asfortranarray(np.ones((3, 4))))
    with pytest.raises(ValueError, match="C-ordered"):
        RowsOnDisk(path)
