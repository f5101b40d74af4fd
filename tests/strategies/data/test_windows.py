"""Every way to hold windows gives the same batches, and holds the bytes that it says."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from harness import Parts, Place, Source
from harness.contract import plugins
from harness.workloads.data.rows import plain_windows

STRATEGIES = {
    name: strategy
    for name, strategy in plugins.load().strategies.items()
    if strategy.rewrites == ("windows",) and strategy.feeds == "same"
}
PAIRS = [(name, backend) for name, strategy in STRATEGIES.items() for backend in strategy.on]
FOR_FRAMES = [(name, backend) for name, backend in PAIRS if STRATEGIES[name].data != "tokens"]
OURS = {
    "device_resident",
    "eager_on_disk",
    "eager_sequences",
    "jax_gather",
    "jax_row_updates",
    "jax_slices",
    "jax_vmap",
    "joint_gather",
    "list_of_views",
    "numpy_copy",
    "python_lists",
    "reused_buffer",
    "stacked_copies",
    "stacked_slices",
    "strided_view",
    "take_from_view",
    "torch_gather",
    "torch_unfold",
}
PLAIN = Parts(None, Place("torch", "cpu"), windows=plain_windows)


def windows_of(name, source, backend=None, **knobs):
    """The windows of a strategy, on its first backend unless told."""
    backend = backend or next(iter(STRATEGIES[name].on))
    parts = STRATEGIES[name].on[backend](replace(PLAIN, place=Place(backend, "cpu")), **knobs)
    return parts.windows(parts, source)


def tokens(n, window, stride, dtype=np.uint16, seed=0):
    ids = np.random.Generator(np.random.Philox(key=seed)).integers(300, 60_000, n + 1).astype(dtype)
    return Source(ids[:-1], ids[1:], window, stride, batch=2)


def test_these_are_among_the_plugins():
    assert set(STRATEGIES) >= OURS


SIZES = [(n, window, stride) for n in (1, 2, 7, 8, 9, 40) for window in (1, 2, 3, 8) for stride in (1, 2, 3, 8, 11)]
COMPILED = [(1, 1, 1), (8, 8, 1), (9, 8, 1), (9, 3, 2), (40, 3, 11)]  # every size is a compilation of its own


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_batches_are_those_of_the_baseline_to_the_last_window(name, backend):
    tried, by_jax = 0, name.startswith("jax") or (name, backend) == ("device_resident", "jax")
    for n, window, stride in [*(COMPILED if by_jax else SIZES), (129, 64, 65)]:
        if window > n:
            continue
        source = tokens(n, window, stride)
        actual, plain = windows_of(name, source, backend), plain_windows(PLAIN, source)
        assert len(actual) == len(plain) == source.count
        everything = np.arange(source.count)
        for indices in (everything, everything[::-1], everything[-1:], np.array([0, source.count - 1])):
            for result, due in zip(actual.batch(indices), plain.batch(indices), strict=True):
                assert np.array_equal(result, due), (n, window, stride)
                assert np.asarray(result).shape == (len(indices), window)
                tried += 1
    assert tried > (40 if by_jax else 500)


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_ignored_targets_pass_unchanged(name, backend):
    source = tokens(40, 8, 3)
    masked = source.targets.astype(np.int32)
    masked[::5] = -100
    source = Source(source.inputs, masked, 8, 3, batch=2)
    _, y = windows_of(name, source, backend).batch(np.arange(source.count))
    _, due = plain_windows(PLAIN, source).batch(np.arange(source.count))
    assert np.array_equal(y, due) and bool((y == -100).any())


@pytest.mark.parametrize(("name", "backend"), FOR_FRAMES)
def test_rows_may_be_vectors(name, backend):
    """A source is `inputs[n, ...]`: frames of a sensor as well as tokens."""
    frames = np.random.Generator(np.random.Philox(key=0)).standard_normal((20, 3), np.float32)
    source = Source(frames[:-1], frames[1:], 4, 2, batch=2)
    actual, plain = windows_of(name, source, backend), plain_windows(PLAIN, source)
    for result, due in zip(actual.batch(np.arange(4)), plain.batch(np.arange(4)), strict=True):
        assert due.shape == (4, 4, 3)
        assert np.array_equal(result, due)


def traced_bytes(name, source, **knobs):
    """Bytes that the windows hold after they were made, and the most while they were."""
    windows_of(name, tokens(20, 4, 2), **knobs)  # what is imported at first use is not charged
    tracemalloc.start()
    try:
        windows = windows_of(name, source, **knobs)
        bytes_held, peak = tracemalloc.get_traced_memory()
        assert len(windows) == source.count
        return bytes_held, peak
    finally:
        tracemalloc.stop()


def batch_bytes(windows, indices):
    """Bytes that one batch of windows takes at most while it is made."""
    tracemalloc.start()
    try:
        windows.batch(np.array(indices))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def array_bytes_held(name, source):
    """Bytes of numpy arrays alone that the windows hold: what else the process allocates does not count."""
    tracemalloc.start()
    try:
        windows = windows_of(name, source)
        of_arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        seen = tracemalloc.take_snapshot().filter_traces([of_arrays])
        assert len(windows) == source.count
        return sum(trace.size for trace in seen.traces)
    finally:
        tracemalloc.stop()


def test_a_strided_view_holds_nothing_and_reads_the_source_itself():
    source = tokens(1 << 20, 256, 1)
    # what other code of the test process allocates meanwhile is traced too; a copy would be the whole source at least
    assert max(traced_bytes("strided_view", source)) < source.inputs.nbytes / 4
    assert array_bytes_held("strided_view", source) < 64 << 10
    windows = windows_of("strided_view", source)
    source.inputs[256], source.targets[256] = 7, 8  # inputs and targets overlap: the later write is in both
    x, y = windows.batch(np.array([1]))
    assert (x[0, 255], y[0, 255]) == (7, 8)
    assert x.flags.owndata or not np.shares_memory(x, source.inputs), "a batch must be a copy"


def test_a_strided_view_copies_only_the_windows_asked_for():
    source = tokens(1 << 18, 512, 1)
    windows = windows_of("strided_view", source)
    windows.batch(np.array([0]))
    assert batch_bytes(windows, [5, 9]) < 64 << 10


def test_slices_are_stacked_for_the_windows_asked_for_alone():
    source = tokens(1 << 18, 512, 1)
    assert array_bytes_held("stacked_slices", source) < 64 << 10
    windows = windows_of("stacked_slices", source)
    source.inputs[256] = 7
    assert windows.batch(np.array([1]))[0][0, 255] == 7, "it reads the source when it is asked, and not before"
    assert batch_bytes(windows, [5, 9]) < 64 << 10


@pytest.mark.parametrize("n", [8, 9, 40])
def test_arrays_filled_from_a_list_are_those_filled_from_an_array(n):
    source = tokens(n, 8, 3)
    everything = np.arange(source.count)
    of_list = windows_of("numpy_copy", source, of_list=True).batch(everything)
    for result, due in zip(of_list, plain_windows(PLAIN, source).batch(everything), strict=True):
        assert np.array_equal(result, due)
        assert result.dtype == np.int32


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("numpy_copy", {"of_list": True}), ("python_lists", {"shared": False}), ("python_lists", {"shared": True})],
)
def test_lists_of_tokens_and_of_frames_have_the_values_of_their_rows(name, knobs):
    frames = np.random.Generator(np.random.Philox(key=0)).standard_normal((20, 3), np.float32)
    for source in (tokens(40, 8, 3), Source(frames, np.arange(20, dtype=np.int32), 4, 2, batch=2)):
        everything = np.arange(source.count)
        of_lists, plain = windows_of(name, source, **knobs), plain_windows(PLAIN, source)
        for result, due in zip(of_lists.batch(everything), plain.batch(everything), strict=True):
            assert np.array_equal(result, due)


def test_a_copy_holds_two_int32_arrays_of_all_windows():
    source = tokens(1 << 15, 64, 8)
    due = 2 * source.count * 64 * 4
    for result in traced_bytes("numpy_copy", source):
        assert result == pytest.approx(due, rel=0.02)
    bytes_held, peak = traced_bytes("numpy_copy", source, of_list=True)
    assert bytes_held == pytest.approx(due, rel=0.02)
    assert peak - due == pytest.approx(len(source.inputs) * (32 + 8), rel=0.02)  # ints and their slots
    before = windows_of("numpy_copy", source)
    source.inputs[:] = 1
    assert not (before.batch(np.array([0]))[0] == 1).any()


def test_lists_hold_a_slot_per_token_of_each_window_and_share_the_ints():
    source = tokens(1 << 14, 64, 2)
    per_window = 56 + 8 * 64  # a list and its slots
    # n tokens as ints of 28 bytes and slots of 8, which inputs and targets share; a slot for each window as well
    due = len(source.inputs) * (28 + 8) + 2 * source.count * (per_window + 8)
    bytes_held, peak = traced_bytes("python_lists", source)
    without_sharing = due + 2 * source.count * 64 * 28
    assert without_sharing > 3 * due
    assert peak == pytest.approx(due, rel=0.1)
    assert bytes_held == pytest.approx(due, rel=0.15)
