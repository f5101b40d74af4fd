"""Where ways to hold windows go wrong without a word: ends, overwritten batches, hidden copies, files left behind."""

import hashlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from harness import Extent, Parts, Place, Source
from harness.contract import plugins
from harness.contract.data import SMALL_INTS
from harness.workloads.data.rows import plain_windows

STRATEGIES = {
    name: strategy
    for name, strategy in plugins.load().strategies.items()
    if strategy.rewrites == ("windows",) and strategy.feeds == "same"
}
PAIRS = [(name, backend) for name, strategy in STRATEGIES.items() for backend in strategy.on]
KINDS = [(name, backend, kind) for name, backend in PAIRS for kind in ("tokens", "frames")]
KINDS = [row for row in KINDS if STRATEGIES[row[0]].data in (None, row[2])]
ON_DEVICE = {"jax_gather", "jax_slices", "jax_vmap", "jax_row_updates"}
BY_NUMPY = [row for row in KINDS if row[1] == "torch" and row[0] != "device_resident"]
BY_JAX = [row for row in KINDS if row[1] == "jax" and row[0] in ON_DEVICE | {"device_resident"}]
PLAIN = Parts(None, Place("torch", "cpu"), windows=plain_windows)


def windows_of(name, source, backend, **knobs):
    parts = STRATEGIES[name].on[backend](replace(PLAIN, place=Place(backend, "cpu")), **knobs)
    return parts.windows(parts, source)


def source_of(kind, n=60, window=7, stride=3, features=5, batch=4):
    draw = np.random.Generator(np.random.Philox(key=n))
    if kind == "tokens":
        ids = draw.integers(300, 60_000, n + 1).astype(np.uint16)
        return Source(ids[:-1], ids[1:], window, stride, batch)
    frames = draw.standard_normal((n, features), np.float32)
    return Source(frames, draw.integers(0, 9, n).astype(np.int32), window, stride, batch)


def extent_of(source):
    """The sizes that a workload would give of a source, the targets 0 where they are a view of the inputs."""
    target_bytes = 0 if np.shares_memory(source.inputs, source.targets) else source.targets[0].nbytes
    return Extent(len(source.inputs), source.inputs[0].nbytes, target_bytes, source.window, source.stride, source.batch)


def digest(batch):
    return [hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest() for array in batch]


@pytest.mark.parametrize(("name", "backend"), PAIRS)
@pytest.mark.parametrize("shift", [0, 5])
def test_a_window_that_does_not_exist_is_refused(name, backend, shift):
    source = source_of("tokens")
    windows = windows_of(name, source, backend)
    for wrong in (source.count + shift, -1 - shift):
        for indices in ([wrong], [0, wrong], [wrong, 1]):
            with pytest.raises((IndexError, ValueError)):
                windows.batch(np.array(indices))
    x, _ = windows.batch(np.array([source.count - 1]))
    assert np.asarray(x).shape == (1, source.window)


@pytest.mark.parametrize(("name", "backend", "kind"), KINDS)
def test_a_batch_stays_as_it_was_handed_out(name, backend, kind):
    source = source_of(kind)
    windows = windows_of(name, source, backend)
    spare = min(3, 3 if windows.lasts is None else windows.lasts - 1)
    assert spare >= 1
    earlier_batches = []
    for first in range(8):
        batch = windows.batch(np.arange(first, first + 4))
        earlier_batches.append((batch, digest(batch)))
        for earlier, checksum in earlier_batches[-1 - spare :]:
            assert digest(earlier) == checksum
    assert len({tuple(checksum) for _, checksum in earlier_batches}) == 8


@pytest.mark.parametrize(("name", "backend", "kind"), KINDS)
def test_writing_to_a_batch_leaves_the_source_and_later_batches_alone(name, backend, kind):
    source = source_of(kind)
    windows = windows_of(name, source, backend)
    before = digest((source.inputs, source.targets))
    first = windows.batch(np.arange(4))
    expected = digest(first)
    for array in first:
        if backend == "torch":
            np.asarray(array)[:] = 1
    assert digest((source.inputs, source.targets)) == before
    assert digest(windows.batch(np.arange(4))) == expected


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_indices_of_any_integer_type_are_taken(name, backend):
    """An order may be of uint32: its product with the stride must not wrap."""
    source = source_of("tokens", n=70_300, window=200, stride=700)
    windows = windows_of(name, source, backend)
    for dtype in (np.uint8, np.uint32, np.int64):
        x, _ = windows.batch(np.array([100, 2], dtype))
        assert np.array_equal(np.asarray(x)[0], source.inputs[70_000:70_200])


@pytest.mark.parametrize("name", ["reused_buffer", "strided_view", "torch_unfold", "torch_gather"])
def test_rows_need_not_be_contiguous(name):
    """A strided view of them must not read what lies between."""
    wide = np.arange(60 * 8, dtype=np.float32).reshape(60, 8)
    source = Source(wide[:, ::2], np.arange(120, dtype=np.int32)[::2], 7, 3, 4)
    for backend in STRATEGIES[name].on:
        for batch_array, due in zip(
            windows_of(name, source, backend).batch(np.arange(4)),
            plain_windows(PLAIN, source).batch(np.arange(4)),
            strict=True,
        ):
            assert np.array_equal(batch_array, due)


def test_rows_that_are_not_contiguous_are_refused_where_a_flat_view_would_be_wrong():
    source = Source(np.ones((60, 8), np.float32)[:, ::2], np.ones(60, np.int32), 7, 3, 4)
    with pytest.raises(ValueError, match="not contiguous"):
        windows_of("device_resident", source, "torch")


@pytest.mark.parametrize(("name", "backend"), [row for row in PAIRS if "buffer" not in row[0]])
def test_rows_that_are_only_read_are_taken(name, backend):
    source = source_of("tokens")
    ids = np.concatenate([source.inputs, source.targets[-1:]])
    ids.flags.writeable = False
    windows = windows_of(name, Source(ids[:-1], ids[1:], 7, 3, 4), backend)
    assert np.array_equal(windows.batch(np.arange(3))[1], plain_windows(PLAIN, source).batch(np.arange(3))[1])


def traced(act):
    """What `act` returned, the bytes that stay while it is kept, and the most in between."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = act()
        traced_bytes, peak = tracemalloc.get_traced_memory()
        return result, traced_bytes - before, peak - before
    finally:
        tracemalloc.stop()


SIZED = {"tokens": {"n": 40_000, "window": 64, "stride": 4}, "frames": {"n": 2000, "window": 16, "features": 64}}
SMALL = {"tokens": {"n": 8000, "window": 64, "stride": 8}, "frames": {"n": 500, "window": 16, "features": 32}}
KNOBS = {"reused_buffer": [{"slots": 4}, {"slots": 400}], "numpy_copy": [{}, {"of_list": True}]}


@pytest.mark.parametrize(("name", "backend", "kind"), [row for row in BY_NUMPY if row[0] != "python_lists"])
def test_what_a_strategy_says_it_holds_is_what_it_holds(name, backend, kind):
    for knobs in KNOBS.get(name, [{}]):
        source = source_of(kind, **SIZED[kind])
        windows_of(name, source_of(kind), backend, **knobs)  # what is imported at first use is not charged
        _, traced_bytes, peak = traced(lambda source=source, knobs=knobs: windows_of(name, source, backend, **knobs))
        says = STRATEGIES[name].holds(extent_of(source), **knobs)
        assert says.source is None
        if name == "eager_on_disk":  # tracemalloc does not see a mapped file
            assert traced_bytes < 32 << 10 and peak <= says.making + (64 << 10)
            assert (says.windows, says.batches) == (0, source.count * extent_of(source).window_bytes)
        else:
            assert traced_bytes == pytest.approx(says.windows, rel=0.05, abs=32 << 10)
            # of a float, which takes 32 bytes, it sees the 24 that were asked for
            unseen = 8 * source.inputs.size if "of_list" in knobs and kind == "frames" else 0
            assert peak == pytest.approx(says.windows + says.making - unseen, rel=0.05, abs=64 << 10)


def made_on_device(act):
    """What `act` returned, and the bytes of the arrays that JAX has more: those before are kept, for their numbers."""
    import jax

    before = {id(array): array for array in jax.live_arrays()}
    result = act()
    return result, sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)


@pytest.mark.parametrize(("name", "backend", "kind"), BY_JAX)
def test_what_a_strategy_says_it_holds_is_what_lives_on_the_device(name, backend, kind):
    sized = {"n": 800, "window": 16, "features": 16} if name == "jax_row_updates" else SIZED[kind]
    source = source_of(kind, **sized)
    windows, size = made_on_device(lambda: windows_of(name, source, backend))
    assert len(windows) == source.count
    assert size == pytest.approx(STRATEGIES[name].holds(extent_of(source)).windows, rel=0.02)


@pytest.mark.parametrize(("name", "backend", "kind"), BY_NUMPY)
def test_a_batch_costs_a_batch(name, backend, kind):
    """All but the control, which copies every window to hand out a few."""
    source = source_of(kind, **SIZED[kind])
    windows = windows_of(name, source, backend)
    windows.batch(np.arange(4))
    _, _, peak = traced(lambda: windows.batch(np.arange(4)))
    if name == "take_from_view":
        assert peak > 0.4 * source.count * extent_of(source).window_bytes
        assert peak == pytest.approx(STRATEGIES[name].holds(extent_of(source)).fetching, rel=0.05)
    else:
        bound = 16 if name == "python_lists" else 8  # 64-bit copies of 16-bit ids; lists of lists
        assert peak < bound * extent_of(source).batch_bytes + (16 << 10)


@pytest.mark.long
def test_functional_updates_hold_a_second_copy_of_all_windows():
    """Counted in a process of its own, whose peak is that of this code."""
    program = """
        import re, resource, sys
        from pathlib import Path
        import numpy as np
        import jax, jax.numpy as jnp
        from harness import Parts, Place, Source, plugins

        def status(key):
            return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

        frames = np.ones((300, 4096), np.float32)
        parts = Parts(None, Place("jax", "cpu"))
        strategy = plugins.load().strategies[sys.argv[1]]
        parts = strategy.on["jax"](parts, **({"limit_mib": 1 << 20} if len(sys.argv) > 2 else {}))
        small = Source(frames[:9], np.ones(9, np.int32), 8, 1, 1)
        parts.windows(parts, small)
        source = Source(frames[:271], np.ones(271, np.int32), 256, 1, 1)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        windows = parts.windows(parts, source)
        print((status("VmHWM") - before) / (16 * 256 * 4096 * 4))
    """
    times = {}
    for name, *more in (("jax_row_updates", "raised"), ("numpy_copy",)):
        command = [sys.executable, "-c", textwrap.dedent(program), name, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times[name] = float(done.stdout)
    assert times["jax_row_updates"] > 1.8
    assert times["numpy_copy"] < 1.3


def test_functional_updates_are_refused_beyond_their_limit():
    source = source_of("frames", n=2000, window=16)
    with pytest.raises(ValueError, match=r"would move .* MiB, more than 64; use fewer windows"):
        windows_of("jax_row_updates", source, "jax", limit_mib=64)


@pytest.mark.parametrize("name", ["device_resident", "jax_gather", "jax_slices", "jax_vmap"])
def test_more_rows_than_jax_can_count_are_refused(name):
    rows = np.broadcast_to(np.zeros(1, np.uint8), (1 << 31,))  # of one byte, seen as so many
    with pytest.raises(ValueError, match="counts to 2,147,483,647 and the source has 2,147,483,648 rows"):
        windows_of(name, Source(rows, rows, 7, 3, batch=4), "jax")


@pytest.mark.parametrize(("name", "backend", "kind"), BY_JAX)
def test_one_compilation_serves_an_epoch(name, backend, kind, caplog):
    import jax

    source = source_of(kind, n=203, window=11, stride=2)
    windows = windows_of(name, source, backend)
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        for first in range(0, source.count - 3, 4):
            windows.batch(np.arange(first, first + 4))
    compiled = [record for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
    assert len(compiled) == 1


def test_inputs_and_targets_in_one_memory_are_moved_to_the_device_once():
    source = source_of("tokens", **SIZED["tokens"])
    apart = replace(source, targets=source.targets.copy())
    for name in ("device_resident", "jax_gather", "jax_slices"):
        sizes = []
        for each in (source, apart):
            windows, size = made_on_device(lambda name=name, each=each: windows_of(name, each, "jax"))
            sizes.append(size)
            assert len(windows) == each.count
        assert sizes == [2 * 40_001, 2 * 2 * 40_000]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_joint_gather_hands_out_two_views_of_one_array_in_the_type_of_the_step(backend):
    source = source_of("tokens")
    x, y = windows_of("joint_gather", source, backend).batch(np.arange(4))
    assert np.shares_memory(np.asarray(x), np.asarray(y))
    assert np.asarray(x).dtype == {"torch": np.int64, "jax": np.int32}[backend]
    apart = replace(source, targets=source.targets.copy())
    again = windows_of("joint_gather", apart, backend).batch(np.arange(4))
    assert not np.shares_memory(*map(np.asarray, again))
    assert digest(again) == digest((x, y))


def test_a_ring_hands_out_its_buffers_in_turn():
    source = source_of("frames")
    for backend in ("torch", "jax"):
        windows = windows_of("reused_buffer", source, backend, slots=2)
        assert windows.lasts == 2
        first, second, third = (windows.batch(np.arange(at, at + 4)) for at in (0, 4, 8))
        assert np.shares_memory(first[0], third[0]) and not np.shares_memory(first[0], second[0])
        larger = windows.batch(np.arange(6))
        assert larger[0].shape == (6, 7, 5) and not any(
            np.shares_memory(larger[0], traced_bytes[0]) for traced_bytes in (first, second)
        )
        assert windows.batch(np.arange(3))[0].shape == (3, 7, 5)


def test_a_ring_gathers_large_windows_as_small_ones():
    source = source_of("frames", n=300, window=20, features=64)  # 5120 bytes a window
    windows, plain = windows_of("reused_buffer", source, "jax"), plain_windows(PLAIN, source)
    for at in (0, 20, 80):
        for batch_array, due in zip(
            windows.batch(np.arange(at, at + 4)), plain.batch(np.arange(at, at + 4)), strict=True
        ):
            assert np.array_equal(batch_array, due)


def test_impossible_knobs_are_refused():
    for name, knobs in (("reused_buffer", {"slots": 0}), ("eager_on_disk", {"block": 0})):
        with pytest.raises(ValueError, match=f"{name}: .*; give at least 1"):
            STRATEGIES[name].on["torch"](PLAIN, **knobs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["tokens", "tokens of 256 values", "tokens of 600 values", "frames"])
def test_lists_hold_what_they_say(kind, shared):
    """Python hands out small objects in multiples of 16 bytes, of which tracemalloc sees what was asked for."""
    kind, _, values = kind.partition(" of ")
    source = source_of(kind, **SMALL[kind])
    if values:
        ids = source.joined % (256 if values == "256 values" else 600)
        source = replace(source, inputs=ids[:-1], targets=ids[1:])
    windows_of("python_lists", source_of(kind), "torch")
    tracemalloc.start()
    try:
        windows = windows_of("python_lists", source, "torch", shared=shared)
        traced_bytes = sum(-(-trace.size // 16) * 16 for trace in tracemalloc.take_snapshot().traces)
    finally:
        tracemalloc.stop()
    assert len(windows) == source.count
    small = None if kind == "frames" else float((source.inputs < SMALL_INTS).mean())
    extent = replace(extent_of(source), small_ints=small)
    says = STRATEGIES["python_lists"].holds(extent, shared=shared)
    assert traced_bytes == pytest.approx(says.windows, rel=0.05)


def test_windows_on_disk_leave_no_file_behind(tmp_path):
    source = source_of("frames", n=500)
    windows = windows_of("eager_on_disk", source, "torch", block=9, folder=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert mapped_in(tmp_path, os.getpid()) > 0
    assert np.array_equal(windows.batch(np.arange(164))[0], plain_windows(PLAIN, source).batch(np.arange(164))[0])
    del windows
    assert mapped_in(tmp_path, os.getpid()) == 0


def mapped_in(folder, pid):
    with open(f"/proc/{pid}/maps") as maps:
        return sum(str(folder) in line for line in maps)


def test_windows_on_disk_leave_no_file_behind_when_the_process_is_killed(tmp_path):
    program = """
        import sys, time
        import numpy as np
        from harness import Parts, Place, Source, plugins

        strategy = plugins.load().strategies["eager_on_disk"]
        parts = strategy.on["jax"](Parts(None, Place("jax", "cpu")), folder=sys.argv[1])
        windows = parts.windows(parts, Source(np.ones((500, 5), np.float32), np.ones(500, np.int32), 7, 3, 4))
        print("made", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "made\n"
            assert mapped_in(tmp_path, process.pid) > 0
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_windows_on_disk_say_where_they_lie(tmp_path):
    parts = STRATEGIES["eager_on_disk"].on["torch"](replace(PLAIN, notes={}), folder=str(tmp_path))
    source = source_of("frames")
    parts.windows(parts, source)
    size = source.count * 7 * (5 * 4 + 4)
    assert parts.notes["file"].startswith(f"{size:,} bytes in {tmp_path} (")
