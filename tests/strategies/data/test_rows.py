"""Every way to hold the rows of a file feeds the batches of the baseline, and holds the bytes that it says."""

import mmap
import os
import subprocess
import tracemalloc
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness import Extent, Holding, Parts, Place, RowsOnDisk, Source, available_bytes
from harness.contract import plugins
from harness.machine.memory import read
from harness.records.task import FrameFile
from harness.run.schedule import conflict
from harness.workloads.data import rows
from harness.workloads.data.frames import drawn
from strategies.data import automatic
from strategies.data.rows import streaming
from strategies.data.windows import list_of_views, numpy_copy

STRATEGIES = plugins.load().strategies
EXACT = ["mapped", "pread", "streaming", "automatic"]
FRAMES, FEATURES, WINDOW, BATCH = 4000, 16, 6, 8


class Shape:
    """What the data parts ask of a shape."""

    def __init__(self, **changes):
        settings = {"frames": FRAMES, "features": FEATURES, "classes": 5, "window": WINDOW, "stride": 1}
        self.__dict__.update(settings | {"batch": BATCH, "shuffle": False} | changes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("frames"), *drawn(FRAMES, FEATURES, 5, 0))


def recorded(folder: Path, frames, labels):
    np.save(folder / "frames.npy", frames)
    np.save(folder / "labels.npy", labels)
    sizes = (*frames.shape, 5, str(frames.dtype), "")
    return FrameFile(folder / "frames.npy", folder / "labels.npy", *sizes)


def parts_of(corpus, *names, knobs=None, **changes):
    parts = Parts(
        Shape(**changes),
        Place("torch", "cpu"),
        corpus,
        rows=rows.read_rows,
        source=lambda parts: rows.frame_source(parts, 0),
        windows=rows.plain_windows,
        order=rows.order,
        batches=rows.batches,
        transfer=lambda parts, x, y: (np.asarray(x), np.asarray(y)),
    )
    for name in names:
        parts = STRATEGIES[name].on["torch"](parts, **(knobs or {}))
    return parts


def loop_of(parts):
    return parts.batches(parts, parts.windows(parts, parts.source(parts)))


def batches_of(parts, count):
    return [(x.copy(), y.copy()) for x, y in islice(loop_of(parts), count)]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for (x, y), (x_due, y_due) in zip(actual, expected, strict=True):
        assert np.array_equal(x, x_due) and np.array_equal(y, y_due)
        assert x.dtype == x_due.dtype and x.shape == x_due.shape


@pytest.mark.parametrize("stride", [1, 4, 9])
@pytest.mark.parametrize(
    ("name", "shuffle"), [*((name, False) for name in EXACT), *((name, True) for name in EXACT if name != "streaming")]
)
def test_an_epoch_and_a_half_is_that_of_the_baseline(corpus, name, stride, shuffle):
    plain = parts_of(corpus, stride=stride, shuffle=shuffle)
    actual = parts_of(corpus, name, stride=stride, shuffle=shuffle)
    count = 3 * ((FRAMES - WINDOW) // stride + 1) // BATCH // 2
    assert_same(batches_of(actual, count), batches_of(plain, count))


@pytest.mark.parametrize("name", ["pread", "streaming"])
def test_windows_apart_and_at_both_ends_are_read(corpus, name):
    knobs = {"rows": 64} if name == "streaming" else None
    parts, plain = parts_of(corpus, name, knobs=knobs), parts_of(corpus)
    actual, expected = (p.windows(p, p.source(p)) for p in (parts, plain))
    last = FRAMES - WINDOW
    for indices in ([0], [last], [last, 0], [5, 5, 5], [0, 3000, 1, 2999, last], list(range(100, 0, -7))):
        for result, due in zip(actual.batch(np.array(indices)), expected.batch(np.array(indices)), strict=True):
            assert np.array_equal(result, due)
    for outside in ([last + 1], [-1], [0, FRAMES]):
        with pytest.raises(IndexError, match=f"not among the {last + 1} of the source"):
            actual.batch(np.array(outside))


@pytest.mark.parametrize(
    ("gap", "together"),
    [(0, [WINDOW + 2, WINDOW, WINDOW, WINDOW]), (1, [WINDOW + 2, WINDOW + 6, WINDOW]), (200, [2000 + WINDOW - 3])],
)
def test_pread_reads_neighbours_together(corpus, monkeypatch, gap, together):
    read_rows = []
    inner = RowsOnDisk.read_into

    def counted(rows, out):
        read_rows.append(len(out))
        return inner(rows, out)

    monkeypatch.setattr(RowsOnDisk, "read_into", counted)
    parts = parts_of(corpus, "pread", knobs={"gap": gap})
    parts.windows(parts, parts.source(parts)).batch(np.array([900, 3, 5, 2000, 906, 4]))
    assert read_rows == together * 2, "inputs, then labels"


def test_streaming_holds_a_block_whatever_the_corpus(tmp_path):
    peaks = []
    for frames in (20_000, 200_000):
        folder = tmp_path / str(frames)
        folder.mkdir()
        big = recorded(folder, np.ones((frames, FEATURES), np.float32), np.zeros(frames, np.int32))
        parts = parts_of(big, "streaming", knobs={"rows": 2048}, frames=frames)
        tracemalloc.start()
        try:
            for _ in islice(loop_of(parts), frames // BATCH):
                pass
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] == pytest.approx(peaks[0], abs=16 << 10)
    extent = Extent(200_000, 4 * FEATURES, 4, WINDOW, 1, BATCH)
    declared = streaming.holds(extent, rows=2048)
    assert peaks[1] == pytest.approx(declared.windows + declared.batches + 2 * extent.batch_bytes, rel=0.1)


def test_streaming_holds_the_order_of_the_block_that_it_shuffles(tmp_path):
    frames = 30_000
    big = recorded(tmp_path, np.ones((frames, 1), np.float32), np.zeros(frames, np.int32))
    parts = parts_of(big, "streaming", knobs={"rows": 20_000}, frames=frames, features=1, shuffle=True)
    batches_of(parts, 1)  # what is imported at first use is not charged
    tracemalloc.start()
    try:
        for _ in islice(loop_of(parts), 10):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    extent = Extent(frames, 4, 4, WINDOW, 1, BATCH, in_order=False)
    declared = streaming.holds(extent, rows=20_000)
    assert peak == pytest.approx(declared.windows + declared.batches + 2 * extent.batch_bytes, rel=0.1)


def test_streaming_reads_the_file_about_once(corpus, monkeypatch):
    read_rows = []
    monkeypatch.setattr(streaming.rows_on_disk, "fill", lambda out, rows: read_rows.append(len(rows)))
    parts = parts_of(corpus, "streaming", knobs={"rows": 500})
    for _ in islice(loop_of(parts), FRAMES // BATCH - 1):
        pass
    assert FRAMES <= sum(read_rows) / 2 < 1.2 * FRAMES


@pytest.mark.parametrize("stride", [1, 4])
def test_streaming_shuffles_within_its_reach_and_misses_none(corpus, stride):
    parts = parts_of(corpus, "streaming", knobs={"rows": 300}, shuffle=True, stride=stride)
    source = parts.source(parts)
    at = parts.order(parts, source, 0)
    epoch = at(0, source.count)
    assert sorted(epoch) == list(range(source.count))
    reach = (300 - WINDOW) // stride + 1
    assert np.abs(epoch - np.arange(source.count)).max() < reach
    assert (epoch[:reach] != np.arange(reach)).mean() > 0.9
    pieces = [at(start, start + 37) for start in range(0, source.count, 37)]
    assert np.array_equal(np.concatenate(pieces), epoch)
    assert not np.array_equal(parts.order(parts, source, 1)(0, 50), epoch[:50])
    plain = parts_of(corpus, stride=stride)
    expected = plain.windows(plain, plain.source(plain))
    for number, (x, y) in enumerate(islice(loop_of(parts), 2 * source.count // BATCH)):
        within = number % (source.count // BATCH)
        wanted = parts.order(parts, source, number // (source.count // BATCH))(within * BATCH, (within + 1) * BATCH)
        x_due, y_due = expected.batch(wanted)
        assert np.array_equal(x, x_due) and np.array_equal(y, y_due)


def test_mapped_rows_are_pages_of_the_file(tmp_path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder is in memory: its pages count as shared, not as file pages")
    rows_NF = np.ones((1 << 20, 16), np.float32)
    path = tmp_path / "rows.npy"
    np.save(path, rows_NF)
    del rows_NF
    before = read()
    mapped = parts_of(None, "mapped").rows(None, path)
    assert read().rss - before.rss < 1 << 20
    mapped[:: 1 << 10].sum()
    after = read()
    assert 0 < after.file - before.file <= path.stat().st_size + (1 << 20)
    assert after.anon - before.anon < 8 << 20


def test_mapped_rows_are_only_read_and_advised_in_one_of_three_ways(corpus):
    mapped = parts_of(None, "mapped").rows(None, corpus.path)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    with pytest.raises(ValueError, match="advise is 'random', 'normal' or 'sequential', not 'never'"):
        parts_of(None, "mapped", knobs={"advise": "never"})


@pytest.mark.parametrize(
    ("knobs", "advice"),
    [
        ({}, mmap.MADV_RANDOM),
        ({"advise": "normal"}, mmap.MADV_NORMAL),
        ({"advise": "sequential"}, mmap.MADV_SEQUENTIAL),
    ],
    ids=str,
)
def test_the_kernel_hears_how_mapped_rows_will_be_read(corpus, monkeypatch, knobs, advice):
    heard = []
    mapped = SimpleNamespace(_mmap=SimpleNamespace(madvise=heard.append))
    monkeypatch.setattr(np.lib.format, "open_memmap", lambda path, mode: mapped)
    assert parts_of(None, "mapped", knobs=knobs).rows(None, corpus.path) is mapped
    assert heard == [advice]


LOW = {"float16_rows": 2.0**-11, "bfloat16_rows": 2.0**-8}


@pytest.mark.parametrize("name", ["bfloat16_rows", "float16_rows", "int8_rows"])
def test_frames_in_fewer_bits_come_back_within_a_rounding(corpus, name):
    actual, expected = batches_of(parts_of(corpus, name), 20), batches_of(parts_of(corpus), 20)
    largest = np.abs(np.load(corpus.path)).max(axis=0)
    different = False
    for (x, y), (x_due, y_due) in zip(actual, expected, strict=True):
        assert np.array_equal(y, y_due) and x.dtype == np.float32
        bound = np.abs(x_due) * LOW[name] + 1e-7 if name in LOW else np.broadcast_to(largest / 254 * 1.001, x.shape)
        assert (np.abs(x - x_due) <= bound).all()
        different = different or not np.array_equal(x, x_due)
    assert different


@pytest.mark.parametrize("windows", ["torch_gather", "torch_unfold", "device_resident"])
@pytest.mark.parametrize("name", ["bfloat16_rows", "float16_rows", "int8_rows"])
def test_frames_that_are_tensors_come_back_as_those_that_are_arrays(corpus, name, windows):
    assert_same(batches_of(parts_of(corpus, name, windows), 3), batches_of(parts_of(corpus, name), 3))


@pytest.mark.parametrize(("name", "item"), [("bfloat16_rows", 2), ("float16_rows", 2), ("int8_rows", 1)])
def test_frames_in_fewer_bits_never_are_wide_in_memory(tmp_path, name, item):
    frames = 60_000
    big = recorded(tmp_path, np.ones((frames, 64), np.float32), np.zeros(frames, np.int32))
    parts = parts_of(big, name, frames=frames, features=64)
    tracemalloc.start()
    try:
        source = parts.source(parts)
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.inputs.itemsize == item
    declared = STRATEGIES[name].holds(Extent(frames, 256, 4, WINDOW, 1, BATCH))
    assert size == pytest.approx(declared.source, rel=0.02)
    assert peak < size + (7 << 20) < frames * 256


def test_bfloat16_rounds_as_torch_does():
    import torch

    from strategies.data.rows.low_bit_rows import as_bfloat16

    values = np.random.Generator(np.random.Philox(key=2)).standard_normal((500, 9)).astype(np.float32)
    values[0] = [0, -0.0, 1, -1, 3.3895e38, 1e-30, 257, 1.00390625, 1.01171875]
    narrow, widen, widen_tensor = as_bfloat16(None)
    out = np.empty(values.shape, np.uint16)
    narrow(values, out)
    due = torch.from_numpy(values).bfloat16().float()
    assert np.array_equal(widen(out), due.numpy()) and torch.equal(widen_tensor(torch.from_numpy(out)), due)


def test_float16_refuses_what_is_beyond_its_range(tmp_path):
    frames = np.ones((100, 4), np.float32)
    frames[50, 1] = 70_000
    parts = parts_of(recorded(tmp_path, frames, np.zeros(100, np.int32)), "float16_rows", frames=100)
    with pytest.raises(ValueError, match="beyond 65504; scale the frames, or use bfloat16_rows"):
        parts.source(parts)


def test_int8_scales_come_from_the_rows_and_a_feature_of_zeros_stays(tmp_path):
    frames, labels = drawn(100, 4, 4, 1)
    frames[:, 2] = 0
    frames[:, 1] *= 1000
    parts = parts_of(recorded(tmp_path, frames, labels), "int8_rows", frames=100)
    (x, _), *_ = batches_of(parts, 1)
    due = np.stack([frames[start : start + WINDOW] for start in range(BATCH)])
    assert (x[..., 2] == 0).all()
    assert (np.abs(x - due) <= np.abs(frames).max(axis=0) / 254 * 1.001).all()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("rows_mib", "available_mib", "eager", "mapped", "copied"),
    [
        (416, 64 << 10, "auto", False, True),
        (416, 25_792, "auto", False, True),
        (416, 25_791, "auto", False, False),
        (416, 8 << 10, "auto", False, False),
        (416, 8 << 10, "always", False, True),
        (416, 64 << 10, "never", False, False),
        (416, 832, "auto", False, False),
        (417, 833, "auto", True, False),
    ],
)
def test_automatic_chooses_by_size_and_memory(rows_mib, available_mib, eager, mapped, copied):
    choice = automatic.choose(rows_mib * MIB, 12_480 * MIB, available_mib * MIB, eager)
    assert (choice.mapped, choice.eager) == (mapped, copied)
    for size in (rows_mib, 12_480, available_mib):
        assert f"{size:,} MiB" in choice.reason


@pytest.mark.parametrize(
    ("available_gib", "eager", "mapped", "copied"),
    [
        (1.0, "auto", False, True),
        (1.0, "never", False, False),
        (0.002, "auto", False, False),
        (0.0001, "auto", True, False),
    ],
)
def test_automatic_does_what_it_notes(corpus, available_gib, eager, mapped, copied):
    parts = parts_of(corpus, "automatic", knobs={"available_gib": available_gib, "eager": eager})
    assert_same(batches_of(parts, 30), batches_of(parts_of(corpus), 30))
    assert ("every window is copied" in parts.notes["choice"]) == copied
    assert parts.notes["choice"].startswith("mapped rows" if mapped else "rows in memory")
    source = parts.source(parts)
    assert isinstance(source.inputs, np.memmap) == mapped


@pytest.mark.parametrize(("backend", "ranks", "copied"), [("torch", 1, True), ("torch", 4, False), ("jax", 4, True)])
def test_automatic_counts_on_the_share_of_a_process(corpus, backend, ranks, copied):
    """Copies would take 1.9 MB with the rows, and half of 10.7 MB may be taken by all processes together."""
    plain = replace(parts_of(corpus), place=Place(backend, "cpu"), ranks=ranks)
    parts = STRATEGIES["automatic"].on[backend](plain, available_gib=0.01)
    parts.windows(parts, parts.source(parts))
    assert ("every window is copied" in parts.notes["choice"]) == copied


def test_automatic_is_predicted_with_the_share_of_a_process():
    extent = Extent(rows=1000, input_bytes=400, target_bytes=400, window=8, stride=1, batch=4)
    copies = numpy_copy.holds(extent).windows
    enough = (2.1 * (extent.base + copies)) / (1 << 30)
    alone, of_two = (automatic.holds(replace(extent, processes=count), available_gib=enough) for count in (1, 2))
    assert alone.windows >= copies > of_two.windows


@pytest.mark.parametrize("dtype", ["float16", "float32", "uint16", "int64"])
def test_automatic_chooses_by_the_bytes_of_the_copies_that_are_made(dtype):
    inputs, labels = np.ones((90, 3), dtype), np.ones(90, np.int64)
    source = Source(inputs, labels, window=8, stride=2, batch=4)
    copies = [numpy_copy.copied(list_of_views.slices(each, source), each, source) for each in (inputs, labels)]
    assert automatic._copies(source) == sum(copy.nbytes for copy in copies)


def test_automatic_takes_no_other_word_for_its_way(corpus):
    with pytest.raises(ValueError, match="eager is one of auto, always, never, not 'maybe'"):
        parts_of(corpus, "automatic", knobs={"eager": "maybe"})


@pytest.mark.parametrize("stride", [1, 4, 9])
def test_the_first_examples_alone_are_kept(corpus, stride):
    few, whole = parts_of(corpus, "max_examples", knobs={"count": 20}, stride=stride), parts_of(corpus, stride=stride)
    source = few.source(few)
    assert source.count == 20 and source.inputs.base is None  # a copy: a view would keep all rows
    assert_same(batches_of(few, 2), batches_of(whole, 2))
    assert "unchanged" not in few.notes
    many = parts_of(corpus, "max_examples", knobs={"count": 10**6}, stride=stride)
    assert_same(batches_of(many, 2), batches_of(whole, 2))
    assert "no more than 1,000,000" in many.notes["unchanged"]


@pytest.mark.parametrize("reader", ["mapped", "pread", "reservoir", "streaming"])
def test_the_first_examples_are_read_of_rows_that_stay_on_disk(corpus, reader):
    few, whole = STRATEGIES["max_examples"].on["torch"](parts_of(corpus, reader), count=20), parts_of(corpus)
    source = few.source(few)
    assert source.count == 20 and source.inputs.base is None
    for actual, due in zip(
        few.windows(few, source).batch(np.arange(20)),
        whole.windows(whole, whole.source(whole)).batch(np.arange(20)),
        strict=True,
    ):
        assert np.array_equal(actual, due)
    pair = [STRATEGIES[name] for name in ("max_examples", reader)]
    assert "lies in memory: name it after" in str(conflict(pair)) and conflict(pair[::-1]) is None


def test_a_source_of_no_more_examples_is_not_copied():
    holds, extent = STRATEGIES["max_examples"].holds, Extent(FRAMES, 4 * FEATURES, 4, WINDOW, 1, BATCH)
    assert holds(extent, count=extent.count) == Holding()
    fewer = holds(extent, count=extent.count - 1)
    assert (fewer.source, fewer.making) == (extent.base - 4 * FEATURES - 4, extent.base)


def test_a_cold_file_is_dropped_before_it_is_mapped_and_another_is_not(corpus, monkeypatch):
    dropped, inner = [], os.posix_fadvise

    def noted(descriptor, *rest):
        dropped.append((os.path.realpath(f"/proc/self/fd/{descriptor}"), *rest))
        inner(descriptor, *rest)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    due = batches_of(parts_of(corpus, "mapped"), 3)
    assert not dropped
    assert_same(batches_of(parts_of(corpus, "mapped", knobs={"cold": True}), 3), due)
    files = (os.path.realpath(path) for path in (corpus.path, corpus.labels))
    assert dropped == [(path, 0, 0, os.POSIX_FADV_DONTNEED) for path in files]


def test_automatic_takes_the_memory_of_this_machine_where_none_is_pretended():
    assert read().rss < available_bytes(0.0) and available_bytes(2.0) == 2 << 30


def test_rows_that_no_window_covers_are_counted(corpus):
    for stride in (1, 7, 9, 4001):
        parts = parts_of(corpus, stride=stride)
        source = parts.source(parts)
        covered = {row for start in range(0, FRAMES - WINDOW + 1, stride) for row in range(start, start + WINDOW)}
        assert source.unused == FRAMES - len(covered)
        assert ("unused" in parts.notes) == (source.unused > 0)
        if source.unused:
            assert f"{source.unused:,} of 4,000 rows" in parts.notes["unused"]
    with pytest.raises(ValueError, match="at least 1, not 6 and 0"):
        parts = parts_of(corpus, stride=0)
        parts.source(parts)


def test_a_reservoir_gives_the_windows_of_its_order_and_keeps_no_more_than_its_size(corpus):
    parts, plain = parts_of(corpus, "reservoir", knobs={"size": 50}), parts_of(corpus)
    source = parts.source(parts)
    expected = plain.windows(plain, plain.source(plain))
    per_epoch = source.count // BATCH
    tracemalloc.start()
    try:
        loop = loop_of(parts)
        orders = [parts.order(parts, source, epoch) for epoch in range(3)]
        for number, (x, y) in enumerate(islice(loop, 2 * per_epoch + 3)):
            epoch, within = divmod(number, per_epoch)
            wanted = orders[epoch](within * BATCH, (within + 1) * BATCH)
            x_due, y_due = expected.batch(wanted)
            assert np.array_equal(x, x_due) and np.array_equal(y, y_due)
            assert not np.array_equal(wanted, np.arange(within * BATCH, (within + 1) * BATCH))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    window = WINDOW * (4 * FEATURES + 4)
    assert 0 < size < 50 * (window + 700) + (2 * BATCH) * window + (64 << 10)


def test_a_reservoir_reads_the_file_once_an_epoch(corpus, monkeypatch):
    read_rows = []
    inner = RowsOnDisk.read_into

    def counted(rows, out):
        read_rows.append(len(out))
        return inner(rows, out)

    monkeypatch.setattr(RowsOnDisk, "read_into", counted)
    parts = parts_of(corpus, "reservoir", knobs={"size": 50})
    count = (FRAMES - WINDOW + 1) // BATCH
    for _ in islice(loop_of(parts), count):
        pass
    windows_read = sum(read_rows) / WINDOW / 2
    assert count * BATCH <= windows_read <= count * BATCH + 50 + BATCH
