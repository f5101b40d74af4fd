"""Loaders of other libraries give the batches of the baseline, from any start, and leave nothing behind."""

import multiprocessing
import threading
import time
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice

import numpy as np
import pytest

from harness import Parts, Place, Source
from harness.contract import plugins
from harness.contract.data import Extent
from harness.run.schedule import conflict
from harness.workloads.data import rows

STRATEGIES = plugins.load().strategies
LOADERS = [("torch_dataloader", {}), ("grain_loader", {}), ("grain_loader", {"workers": 2}), ("keras_timeseries", {})]
IDS = [name + "".join(f"-{value}" for value in knobs.values()) for name, knobs in LOADERS]


def unchanged(parts, x, y):
    """Keep a copy: a loader may hand out the same memory again."""
    return np.array(x), np.array(y)


PLAIN = Parts(
    None, Place("torch", "cpu"), windows=rows.plain_windows, order=rows.order, batches=rows.batches, transfer=unchanged
)


def tokens(n=97, **changes):
    ids = np.random.Generator(np.random.Philox(key=1)).integers(300, 60_000, n + 1).astype(np.uint16)
    return replace(Source(ids[:-1], ids[1:], 8, 3, batch=4, seed=5), **changes)


def frames(n=63, **changes):
    random = np.random.Generator(np.random.Philox(key=2))
    frames_NF, labels_N = random.standard_normal((n, 5), np.float32), random.integers(0, 7, n).astype(np.int32)
    return replace(Source(frames_NF, labels_N, 6, 2, batch=4, seed=5), **changes)


def parts_of(name, monkeypatch, plain=PLAIN, **knobs):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    strategy = STRATEGIES[name]
    missing = [package for package in strategy.needs if find_spec(package) is None]
    if missing:
        pytest.skip(f"{name} needs the package {missing[0]}")
    return strategy.on["torch"](replace(plain, notes={}), **knobs)


def first_batches(parts, source, number):
    with closing(parts.batches(parts, parts.windows(parts, source))) as batches:
        return list(islice(batches, number))


def assert_equal(result, due):
    assert len(result) == len(due) > 0
    for actual, expected in zip(result, due, strict=True):
        for one, other in zip(actual, expected, strict=True):
            assert one.shape == other.shape and np.array_equal(one, other)


def epoch_and_half(source):
    whole = source.count // source.batch
    assert whole >= 4 and source.count % source.batch, "the last batch must be ragged"
    return whole + whole // 2


def assert_no_process_is_left():
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("make", [tokens, frames])
@pytest.mark.parametrize(("name", "knobs"), LOADERS, ids=IDS)
def test_the_batches_are_those_of_the_baseline(name, knobs, make, monkeypatch):
    parts = parts_of(name, monkeypatch, **knobs)
    source = make()
    number = epoch_and_half(source)
    assert_equal(first_batches(parts, source, number), first_batches(PLAIN, source, number))


@pytest.mark.parametrize("make", [tokens, frames])
@pytest.mark.parametrize(("name", "knobs"), LOADERS[:-1], ids=IDS[:-1])  # Keras shuffles by itself: see below
def test_shuffled_batches_are_those_of_the_baseline(name, knobs, make, monkeypatch):
    parts = parts_of(name, monkeypatch, **knobs)
    source = make(shuffle=True)
    number = epoch_and_half(source)
    assert_equal(first_batches(parts, source, number), first_batches(PLAIN, source, number))


@pytest.mark.parametrize("start", [2, 7, 23])
@pytest.mark.parametrize(("name", "knobs"), LOADERS, ids=IDS)
def test_a_start_continues_where_another_run_ended(name, knobs, start, monkeypatch):
    parts = parts_of(name, monkeypatch, **knobs)
    source = tokens(shuffle=name != "keras_timeseries")
    number = epoch_and_half(source)
    due = first_batches(PLAIN, source, start + number)[start:]
    assert_equal(first_batches(parts, replace(source, start=start), number), due)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
@pytest.mark.parametrize("make", [tokens, frames])
def test_worker_processes_give_the_same_and_end(make, monkeypatch):
    parts = parts_of("torch_dataloader", monkeypatch, workers=2)
    source = make(shuffle=True, start=2)
    number = epoch_and_half(source)
    batches = parts.batches(parts, parts.windows(parts, source))
    result = [next(batches)]
    assert len(multiprocessing.active_children()) == 2
    result += islice(batches, number - 1)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert_no_process_is_left()
    assert_equal(result, first_batches(PLAIN, source, number))


def test_threads_end_when_batches_are_closed(monkeypatch):
    parts = parts_of("grain_loader", monkeypatch, workers=2)

    def alive():
        return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]

    batches = parts.batches(parts, parts.windows(parts, tokens()))
    next(batches)
    assert alive()
    batches.close()
    deadline = time.monotonic() + 10
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive()


def test_rows_of_a_file_that_cannot_be_written_are_taken_without_a_warning(tmp_path, monkeypatch):
    source = tokens()
    np.save(tmp_path / "ids.npy", np.append(source.inputs, source.targets[-1]))
    ids = np.load(tmp_path / "ids.npy", mmap_mode="r")
    source = replace(source, inputs=ids[:-1], targets=ids[1:])
    due = first_batches(PLAIN, source, 3)
    for name, knobs in LOADERS:
        if all(find_spec(package) for package in STRATEGIES[name].needs):
            assert_equal(first_batches(parts_of(name, monkeypatch, **knobs), source, 3), due)


def test_torch_keeps_its_random_numbers(monkeypatch):
    import torch

    parts = parts_of("torch_dataloader", monkeypatch)
    torch.manual_seed(3)
    due = torch.rand(4)
    torch.manual_seed(3)
    first_batches(parts, tokens(shuffle=True), 5)
    assert torch.equal(torch.rand(4), due)


@pytest.mark.parametrize("make", [tokens, frames])
def test_keras_shuffles_each_window_once_with_its_own_targets(make, monkeypatch):
    parts = parts_of("keras_timeseries", monkeypatch)
    source = make(shuffle=True)
    whole = source.count // source.batch
    result = first_batches(parts, source, 2 * whole)
    assert_equal(result[:whole], result[whole:])
    windows = rows.plain_windows(PLAIN, source)
    due = {x.tobytes(): y.tobytes() for x, y in zip(*windows.batch(np.arange(source.count)), strict=True)}
    target_of = {
        x.tobytes(): y.tobytes() for xs, ys in result for x, y in zip(xs.astype(source.inputs.dtype), ys, strict=True)
    }
    assert len(target_of) == whole * source.batch
    y_dtype = result[0][1].dtype
    for x, y in target_of.items():
        assert np.array_equal(np.frombuffer(y, y_dtype), np.frombuffer(due[x], source.targets.dtype))
    assert any(
        not np.array_equal(a[0], b[0]) for a, b in zip(result, first_batches(PLAIN, source, whole), strict=False)
    )


@pytest.mark.parametrize(
    "name",
    ["torch_dataloader", "grain_loader", "keras_timeseries", "hf_datasets", "prefetch_process", "prefetch_shared"],
)
def test_windows_that_are_chosen_otherwise_are_refused(name, monkeypatch):
    """Also where the first windows are those that lie one stride apart."""
    parts = STRATEGIES["document_windows"].on["torch"](parts_of(name, monkeypatch), end=400, tail="pad")
    with pytest.raises(ValueError, match="fixed stride: leave out the strategy"):
        first_batches(parts, tokens(batch=1), 1)


@pytest.mark.parametrize("name", ["prefetch_process", "prefetch_shared"])
def test_what_cuts_windows_itself_does_not_say_which_they_are(name, monkeypatch):
    parts = parts_of(name, monkeypatch, parts_of("torch_dataloader", monkeypatch))
    with pytest.raises(ValueError, match="leave one of the two out"):
        first_batches(parts, tokens(), 1)


@pytest.mark.parametrize("name", ["prefetch_shared", "torch_dataloader"])
def test_blocks_are_refused_what_cuts_other_windows(name):
    pair = [STRATEGIES[each] for each in ("hf_datasets", name)]
    assert "would not be these blocks" in str(conflict(pair)) and conflict(pair) == conflict(pair[::-1])


@pytest.mark.parametrize("name", ["torch_dataloader", "grain_loader", "keras_timeseries", "hf_datasets"])
def test_less_than_one_batch_is_refused(name, monkeypatch):
    with pytest.raises(ValueError, match="use a longer corpus"):
        first_batches(parts_of(name, monkeypatch), tokens(20, batch=16), 1)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files, in which what is left can be seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_grouped_text_in_one_map_batch_is_the_baseline_without_overlap(temporary, monkeypatch):
    source = tokens(stride=8, batch=2, shuffle=True, start=4)
    parts = parts_of("hf_datasets", monkeypatch, document=10, examples=100)
    number = 9  # of 6 an epoch
    assert_equal(first_batches(parts, source, number), first_batches(PLAIN, source, number))
    assert parts.notes["coverage"] == 96 / 97
    assert not list(temporary.glob("hf-datasets-*"))


def test_grouped_text_drops_the_tail_of_each_map_batch(temporary, monkeypatch):
    source = tokens(103, batch=1)
    parts = parts_of("hf_datasets", monkeypatch, document=10, examples=3)
    batches = parts.batches(parts, parts.windows(parts, source))
    result = [next(batches) for _ in range(10)]
    assert list(temporary.glob("hf-datasets-*"))
    batches.close()
    assert not list(temporary.glob("hf-datasets-*"))
    starts = [first + 8 * block for first in (0, 30, 60) for block in range(3)] + [90]  # 30 rows hold 3 blocks, 13 one
    due = [(source.inputs[s : s + 8][None], source.targets[s : s + 8][None]) for s in starts]
    assert_equal(result, due)
    assert parts.notes["coverage"] == 80 / 103


def test_no_block_at_all_is_refused(monkeypatch, temporary):
    parts = parts_of("hf_datasets", monkeypatch, document=5, examples=1)
    with pytest.raises(ValueError, match="raise examples"):
        first_batches(parts, tokens(), 1)


def test_keras_holds_the_bytes_that_it_says(monkeypatch):
    import tracemalloc

    source = frames(20_000, window=20, stride=1)
    extent = Extent(20_000, 20, 4, 20, 1, 4)
    parts = parts_of("keras_timeseries", monkeypatch)
    first_batches(parts, frames(), 1)  # what is imported at first use is not charged
    batches = parts.batches(parts, parts.windows(parts, source))
    tracemalloc.start()
    try:
        next(batches)
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    batches.close()
    due = STRATEGIES["keras_timeseries"].holds(extent)
    assert size == pytest.approx(due.windows + due.batches, rel=0.08)


def test_what_is_held_grows_with_the_workers():
    extent = Extent(1000, 20, 4, 30, 1, 8)
    holds = STRATEGIES["torch_dataloader"].holds
    assert (holds(extent).windows, holds(extent).making, holds(extent).batches) == (0, 0, 0)
    assert holds(extent, workers=2).making == 1000 * 24, "sent to the workers, which are processes of their own"
    assert holds(extent, workers=2).windows == 0
    assert STRATEGIES["grain_loader"].holds(extent, workers=2).batches == 4 * 8 * 30 * 24
    assert STRATEGIES["grain_loader"].holds(extent).windows == 8 * 971
