"""Every way to run batches gives those of the baseline, keeps no more than it may, and leaves nothing behind."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from itertools import islice

import numpy as np
import psutil
import pytest

from harness import Extent, Parts, Place, Source, Windows
from harness.contract import plugins
from harness.run.schedule import conflict
from harness.workloads.data import rows
from strategies.data.batches import exact_resume

STRATEGIES = plugins.load().strategies
SAME = {
    "preallocated_batches": {},
    "item_by_item": {},
    "prefetch_thread": {},
    "prefetch_process": {"workers": 2, "depth": 2},
    "prefetch_shared": {"workers": 2, "depth": 2},
    "prefetch_device": {},
    "exact_resume": {},
}
SHUFFLES = ["global_shuffle", "bijective_shuffle", "chunked_shuffle", "buffered_shuffle", "random_crop"]
PROCESSES = ["prefetch_process", "prefetch_shared"]
PLAIN = Parts(
    None,
    Place("torch", "cpu"),
    rows=rows.read_rows,
    windows=rows.plain_windows,
    order=rows.order,
    batches=rows.batches,
    transfer=lambda parts, x, y: (x, y),
)


def with_strategies(*names, backend="torch", **knobs):
    parts = PLAIN
    for name in names:
        parts = STRATEGIES[name].on[backend](parts, **(knobs or STRATEGIES[name].probe))
    return parts


def tokens(n=50, window=5, stride=3, batch=3, **more):
    ids = np.random.Generator(np.random.Philox(key=0)).integers(0, 60_000, n + 1).astype(np.uint16)
    return Source(ids[:-1], ids[1:], window, stride, batch, **more)


def frames(n=40, features=3, window=4, stride=2, batch=3, **more):
    values = np.random.Generator(np.random.Philox(key=1)).standard_normal((n, features), np.float32)
    values[3, 1] = np.nan  # equal to itself in bits alone
    return Source(values, np.arange(n, dtype=np.int32), window, stride, batch, **more)


def flow(parts, source):
    return parts.batches(parts, parts.windows(parts, source))


def first(parts, source, number):
    """The first batches, copied as they come."""
    batches = flow(parts, source)
    result = [tuple(np.array(a) for a in batch) for batch in islice(batches, number)]
    batches.close()
    return result


def assert_equal(result, due):
    assert len(result) == len(due) > 0
    for actual, expected in zip(result, due, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.tobytes() == b.tobytes()


def running():
    """Threads and child processes."""
    return {*threading.enumerate()}, {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    before = running()
    yield
    assert running() == before


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(
    "source", [tokens(), tokens(shuffle=True), frames(shuffle=True)], ids=["ids", "mixed", "frames"]
)
def test_batches_are_those_of_the_baseline(name, source):
    whole = rows.per_epoch(source)
    number = whole * 5 // 2  # two epochs and a half
    assert number > 2 * whole >= 6
    assert_equal(first(with_strategies(name), source, number), first(PLAIN, source, number))


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_continues_where_another_one_ended(name, shuffle):
    source = tokens(shuffle=shuffle)
    whole = rows.per_epoch(source)
    due = first(PLAIN, source, 3 * whole)
    for start in (1, whole - 1, whole, whole + 2):
        result = first(with_strategies(name), replace(source, start=start), 3 * whole - start)
        assert_equal(result, due[start:])


@pytest.mark.parametrize("order", SHUFFLES)
@pytest.mark.parametrize("name", ["preallocated_batches", "prefetch_shared", "exact_resume"])
def test_orders_are_kept(name, order):
    source = tokens(start=2)
    number = 2 * rows.per_epoch(source)
    assert_equal(first(with_strategies(order, name), source, number), first(with_strategies(order), source, number))


def test_the_parts_that_transfer_are_asked_to():
    def transfer(parts, x, y):
        return -x.astype(np.int64), y.astype(np.int64)

    source = tokens()
    due = first(replace(PLAIN, transfer=transfer), source, 4)
    assert (due[0][0] < 0).any()
    for name in SAME:
        parts = replace(with_strategies(name), transfer=transfer)
        assert_equal(first(parts, source, 4), due)


def test_they_compose():
    names = ["item_by_item", "prefetch_shared", "prefetch_thread", "prefetch_device", "exact_resume"]
    source = tokens(shuffle=True)
    assert_equal(first(with_strategies(*names), source, 12), first(PLAIN, source, 12))


@pytest.mark.parametrize("name", SAME)
def test_a_batch_stays_as_it_was_handed_out(name):
    """Windows that use the memory of three batches in turn: what is kept longer must have been copied."""
    source = tokens(n=80, batch=5, shuffle=True)
    parts = with_strategies(name, **({"depth": 1} if name == "prefetch_thread" else {}))
    windows = in_turn(source, 3)
    batches = parts.batches(parts, windows)
    result = []
    for batch in islice(batches, 30):
        time.sleep(0.001)  # what runs ahead gets as far as it can
        result.append(tuple(np.array(a) for a in batch))
    batches.close()
    assert_equal(result, first(PLAIN, source, 30))


def in_turn(source, lasts):
    """Windows that are handed out in the same few arrays again and again."""
    plain = rows.plain_windows(PLAIN, source)
    rooms = []

    def batch(indices_B):
        made = plain.batch(indices_B)
        if len(rooms) < lasts or len(made[0]) != len(rooms[0][0]):
            rooms.append(made)
            return made
        room = rooms.pop(0)
        rooms.append(room)
        for target, values in zip(room, made, strict=True):
            target[...] = values
        return room

    return Windows(source, batch, lasts)


@pytest.mark.parametrize(
    ("name", "depth", "lasts", "remedy"),
    [
        ("prefetch_thread", 2, 3, "set depth to 1"),
        ("prefetch_thread", 1, 2, "no depth is small enough"),
        ("prefetch_device", 3, 3, "set depth to 2"),
        ("prefetch_device", 1, 1, "no depth is small enough"),
    ],
)
def test_windows_that_do_not_last_are_refused(name, depth, lasts, remedy):
    parts = with_strategies(name, depth=depth)
    source = tokens()
    with pytest.raises(ValueError, match=remedy):
        parts.batches(parts, in_turn(source, lasts))
    parts.batches(parts, in_turn(source, lasts + 1)).close()


def test_what_two_prefetchers_keep_is_added():
    parts = with_strategies("prefetch_thread", "prefetch_device", depth=1)
    parts.batches(parts, in_turn(tokens(), 4)).close()
    with pytest.raises(ValueError, match="prefetch_thread"):
        parts.batches(parts, in_turn(tokens(), 3))


@pytest.fixture(scope="module")
def nothing_left_over():
    """Free what other tests have left: its descriptors could be closed at any time."""
    gc.collect()


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_early_ends_what_was_started(name, taken):
    before, descriptors = running(), len(os.listdir("/proc/self/fd"))
    batches = flow(with_strategies(name), tokens())
    for _ in islice(batches, taken):
        pass
    if taken and name in PROCESSES:
        assert len(running()[1] - before[1]) == 2
    if taken and name == "prefetch_thread":
        assert len(running()[0] - before[0]) == 1
    batches.close()
    del batches
    assert running() == before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("name", SAME)
def test_an_error_of_the_windows_or_of_the_order_reaches_the_consumer(name):
    def order(parts, source, epoch):
        def at(start, stop):
            if start >= 6:
                raise ZeroDivisionError("no such place")
            return np.arange(start, stop)

        return at

    batches = flow(replace(with_strategies(name), order=order), tokens())
    with pytest.raises(ZeroDivisionError, match="no such place"):
        list(islice(batches, 8))


@pytest.mark.parametrize("name", PROCESSES)
def test_an_error_of_a_worker_reaches_the_consumer(name):
    source = tokens()

    def order(parts, source, epoch):
        return lambda start, stop: np.arange(start, stop) + (source.count if start == 6 else 0)

    batches = flow(replace(with_strategies(name), order=order), source)
    assert_equal([next(batches), next(batches)], first(PLAIN, source, 2))
    with pytest.raises(IndexError, match=f"not among the {source.count}"):
        next(batches)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_worker_that_was_killed_is_told_of(name):
    before = running()[1]
    batches = flow(with_strategies(name), tokens())
    next(batches)
    for child in running()[1] - before:
        os.kill(child, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"{name}: a worker ended with exit code -9"):
        list(islice(batches, 9))


@pytest.mark.parametrize("name", PROCESSES)
def test_windows_with_other_values_are_refused(name):
    """Workers cut plain windows: what another strategy makes of them would be lost."""
    parts = with_strategies(name)
    source = frames()
    plain = rows.plain_windows(PLAIN, source)
    rounded = Windows(source, lambda indices: tuple(a.astype(np.float16) for a in plain.batch(indices)))
    with pytest.raises(ValueError, match=f"{name}: its workers cut plain windows"):
        parts.batches(parts, rounded)


@pytest.mark.parametrize("name", PROCESSES)
def test_other_values_are_seen_where_a_batch_is_one_window(name):
    """The first window, which alone would fill a batch, is as it should be."""
    parts, source = with_strategies(name), frames(batch=1)
    plain = rows.plain_windows(PLAIN, source)
    with pytest.raises(ValueError, match=f"{name}: its workers cut plain windows"):
        parts.batches(parts, Windows(source, lambda indices: plain.batch(np.minimum(indices, 2))))


@pytest.mark.parametrize("name", PROCESSES)
def test_workers_load_numpy_alone(name):
    before = running()[1]
    batches = flow(with_strategies(name), tokens())
    next(batches)
    workers = running()[1] - before
    assert len(workers) == 2
    for worker in workers:
        with open(f"/proc/{worker}/maps") as file:
            mapped = file.read()
        assert "numpy" in mapped and "torch" not in mapped and "jaxlib" not in mapped
    batches.close()


@pytest.mark.parametrize("name", PROCESSES)
def test_workers_end_with_their_parent(name):
    """A parent that is killed cannot put anything away: workers go by themselves, and shared memory has no name."""
    script = f"""
import sys, time
sys.path[:0] = [{os.path.dirname(__file__)!r}]
import test_batches as tests
batches = tests.flow(tests.with_strategies({name!r}), tests.tokens())
next(batches)
print(*tests.running()[1], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        named = set().union(*(shared_names(process.pid) for process in (parent, *workers)))
        parent.kill()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert not named & set(os.listdir("/dev/shm"))


def shared_names(pid):
    """Names in /dev/shm of what a process has open or mapped."""
    folder = f"/proc/{pid}/fd"
    with open(f"/proc/{pid}/maps") as maps:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps]
    paths += [os.readlink(f"{folder}/{descriptor}") for descriptor in os.listdir(folder)]
    return {os.path.basename(path) for path in paths if os.path.dirname(path) == "/dev/shm"}


def test_rows_are_read_into_shared_memory_once(tmp_path):
    """The source that was read lies where the workers read it: no copy is lent beside it."""
    values = np.random.Generator(np.random.Philox(key=2)).standard_normal((200, 5), np.float32)
    for name, array in (("c", values), ("f", np.asfortranarray(values))):
        np.save(tmp_path / f"{name}.npy", array)
        parts = with_strategies("prefetch_shared")
        before = memory_files()
        read = parts.rows(parts, tmp_path / f"{name}.npy")
        assert np.array_equal(read, values) and read.dtype == values.dtype
        assert len(memory_files() - before) == 2  # the descriptor and the map's own
        source = Source(read[:-1], read[1:], 4, 1, 3)
        of_rows = memory_files()
        batches = flow(parts, source)
        due = first(PLAIN, source, 2)
        assert_equal([next(batches), next(batches)], due)
        slots = memory_files() - of_rows
        assert len(slots) == 2 * 3  # of inputs, targets and indices
        assert sum(size for _, size in slots) == 2 * STRATEGIES["prefetch_shared"].holds(extent_of(source)).batches
        batches.close()
        del read, source, batches
        assert memory_files() == before


def test_targets_that_lie_in_no_file_are_copied_to_shared_memory(tmp_path):
    ids = tokens().inputs
    np.save(tmp_path / "ids.npy", ids)
    parts = with_strategies("prefetch_shared")
    read = parts.rows(parts, tmp_path / "ids.npy")
    source = Source(read, np.where(ids % 5, ids.astype(np.int32), -100), 4, 1, 3)
    of_rows = memory_files()
    batches = flow(parts, source)
    assert_equal([next(batches)], first(PLAIN, source, 1))
    taken = sum(size for _, size in memory_files() - of_rows)
    batches.close()
    says = STRATEGIES["prefetch_shared"].holds(replace(extent_of(source), values=60_000))
    assert taken == 2 * says.batches, "of each a descriptor and the map's own"


def memory_files():
    """Descriptors of shared memory, with their bytes."""
    result = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:rows"):
                result.add((descriptor, os.fstat(int(descriptor)).st_size))
        except OSError:
            continue
    return result


class Diary:
    """When batches were gathered and used: a line of process, start and end in nanoseconds for each."""

    PAUSE = 0.02

    def __init__(self, path):
        self.path = path
        path.touch()

    def pause(self):
        start = time.monotonic_ns()
        time.sleep(self.PAUSE)
        return start, time.monotonic_ns()

    def windows(self, source):
        """Windows that take 20 ms a batch."""
        plain = rows.plain_windows(PLAIN, source)

        def batch(indices_B):
            start, end = self.pause()
            with self.path.open("a") as lines:
                lines.write(f"{os.getpid()} {start} {end}\n")
            return plain.batch(indices_B)

        return Windows(source, batch)

    def uses(self, batches):
        """The times at which ten batches were used, for 20 ms each."""
        times = [self.pause() for _ in islice(batches, 10)]
        batches.close()
        return times

    def gathers(self):
        return [tuple(int(value) for value in line.split()) for line in self.path.read_text().splitlines()]


def overlaps(some, others):
    """How many of some times lie in part within one of the others."""
    return sum(any(start < to and since < end for since, to in others) for start, end in some)


def of_workers(gathers):
    """How many gathers overlap with one of another process."""
    return sum(
        overlaps([(start, end)], [(since, to) for other, since, to in gathers if other != process])
        for process, start, end in gathers
    )


def test_a_thread_overlaps_with_the_consumer(tmp_path):
    counts = {}
    for name, parts in (("plain", PLAIN), ("thread", with_strategies("prefetch_thread"))):
        diary = Diary(tmp_path / name)
        uses = diary.uses(parts.batches(parts, diary.windows(tokens())))
        counts[name] = overlaps(uses, [(start, end) for _, start, end in diary.gathers()])
    assert counts["plain"] == 0
    assert counts["thread"] >= 2, "of ten batches"


SLOW_WORKER = """
import os
import time
import numpy as np


class Slow(np.ndarray):
    def __getitem__(self, key):  # once for the inputs, once for the targets
        start = time.monotonic_ns()
        time.sleep(0.01)
        with open(os.environ["DIARY"], "a") as lines:
            lines.write(f"{os.getpid()} {start} {time.monotonic_ns()}\\n")
        return super().__getitem__(key)


as_strided = np.lib.stride_tricks.as_strided
np.lib.stride_tricks.as_strided = lambda *given, **more: as_strided(*given, **more).view(Slow)
"""


@pytest.mark.parametrize("name", PROCESSES)
def test_workers_overlap_with_the_consumer_and_with_each_other(name, tmp_path, monkeypatch):
    """Workers gather slowly, and note when, by what every interpreter loads when it starts."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for workers in (1, 2):
        diary = Diary(tmp_path / str(workers))
        monkeypatch.setenv("DIARY", str(diary.path))
        parts = with_strategies(name, workers=workers, depth=1)
        uses = diary.uses(flow(parts, tokens()))
        gathers = diary.gathers()
        assert len({process for process, _, _ in gathers} - {os.getpid()}) == workers
        assert overlaps(uses, [(start, end) for _, start, end in gathers]) >= 2, "of ten batches"
        if workers == 1:
            assert of_workers(gathers) == 0
        else:
            assert of_workers(gathers) >= 2, "of some twenty batches"


def test_device_batches_are_made_one_ahead():
    made = []

    def transfer(parts, x, y):
        made.append(1)
        return x, y

    for backend in ("torch", "jax"):
        for depth in (1, 3):
            made.clear()
            parts = replace(with_strategies("prefetch_device", backend=backend, depth=depth), transfer=transfer)
            batches = flow(parts, tokens())
            for number in range(1, 5):
                next(batches)
                assert len(made) == number + depth
            batches.close()


@pytest.mark.parametrize("depth", [1, 4])
def test_a_thread_makes_as_many_batches_ahead_as_wait_and_one_more(depth):
    made = []

    def transfer(parts, x, y):
        made.append(1)
        return x, y

    batches = flow(replace(with_strategies("prefetch_thread", depth=depth), transfer=transfer), tokens())
    next(batches)
    assert settled(lambda: len(made), depth + 2) == depth + 2, "the one in use, those that wait, the one in the making"
    batches.close()


@pytest.mark.gpu
def test_device_batches_on_cuda_are_those_of_the_host():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def transfer(parts, x, y):
        return tuple(torch.as_tensor(a).to("cuda", torch.float32) for a in (x, y))

    plain = replace(PLAIN, place=Place("torch", "cuda"), transfer=transfer)
    parts = STRATEGIES["prefetch_device"].on["torch"](plain)
    source = frames(n=4000, features=64, window=64, batch=64)
    for actual, expected in islice(zip(flow(parts, source), flow(plain, source), strict=True), 50):
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_an_epoch_is_gathered_once_as_long_as_the_order_stays():
    calls = []

    def counted(source):
        plain = rows.plain_windows(PLAIN, source)

        def batch(indices_B):
            calls.append(indices_B)
            return plain.batch(indices_B)

        return Windows(source, batch)

    parts = with_strategies("preallocated_batches")
    for shuffle, times in ((False, 1), (True, 3)):
        calls.clear()
        source = tokens(shuffle=shuffle)
        whole = rows.per_epoch(source)
        batches = parts.batches(parts, counted(source))
        next(batches)
        assert len(calls) == whole
        for _ in islice(batches, 3 * whole - 1):
            pass
        batches.close()
        assert len(calls) == times * whole


def test_items_are_asked_for_one_by_one():
    sizes = []

    def batch(indices_B):
        sizes.append(len(indices_B))
        return plain.batch(indices_B)

    source = tokens()
    plain = rows.plain_windows(PLAIN, source)
    parts = with_strategies("item_by_item")
    next(parts.batches(parts, Windows(source, batch)))
    assert sizes == [1] * source.batch


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_items_stay_on_the_device(backend):
    if backend == "torch":
        from torch import Tensor as Array
        from torch import as_tensor as moved
    else:
        from jax import Array
        from jax.numpy import asarray as moved
    source = frames()
    plain = rows.plain_windows(PLAIN, source)
    parts = STRATEGIES["item_by_item"].on[backend](PLAIN)
    windows = Windows(source, lambda indices: tuple(moved(a) for a in plain.batch(indices)))
    x, y = next(parts.batches(parts, windows))
    assert isinstance(x, Array) and isinstance(y, Array)
    assert_equal([(np.asarray(x), np.asarray(y))], first(PLAIN, source, 1))


def test_a_position_is_written_after_each_batch(tmp_path):
    parts = with_strategies("exact_resume", folder=str(tmp_path))
    source = tokens()
    batches = flow(parts, source)
    next(batches)
    assert not list(tmp_path.iterdir())  # the first is not consumed yet
    for done in range(1, 4):
        next(batches)
        assert json.loads((tmp_path / "position.json").read_text())["batches"] == done
    batches.close()
    assert json.loads((tmp_path / "position.json").read_text())["batches"] == 4  # closed: the last one, too
    assert [file.name for file in tmp_path.iterdir()] == ["position.json"]
    assert parts.notes["state_bytes"] == (tmp_path / "position.json").stat().st_size < 1024
    again = with_strategies("exact_resume", folder=str(tmp_path), resume=True)
    assert_equal(first(again, source, 5), first(PLAIN, source, 9)[4:])


def test_a_position_is_written_every_so_often(tmp_path):
    batches = flow(with_strategies("exact_resume", folder=str(tmp_path), every=3), tokens())
    seen = []
    for _ in islice(batches, 8):
        file = tmp_path / "position.json"
        seen.append(json.loads(file.read_text())["batches"] if file.exists() else 0)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6]
    batches.close()
    assert json.loads(file.read_text())["batches"] == 8


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (tokens(seed=1, shuffle=True), "order"),
        (tokens(n=49), "source"),
        (tokens(stride=2), "count"),
        (tokens(batch=4), "order"),
        (frames(), "source"),
    ],
)
def test_a_position_of_another_run_is_refused(tmp_path, other, name):
    parts = with_strategies("exact_resume", folder=str(tmp_path), resume=True)
    first(parts, tokens(), 2)
    with pytest.raises(ValueError, match=f"written for another run: its {name} is"):
        flow(parts, other)
    with pytest.raises(ValueError, match="written for another run: its order is"):
        flow(replace(parts, order=with_strategies("global_shuffle").order), tokens())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"batches": -1}', '{"batches": "4"}'])
def test_a_spoilt_position_is_refused(tmp_path, text):
    (tmp_path / "position.json").write_text(text)
    with pytest.raises(ValueError, match="is no position of exact_resume: remove it"):
        flow(with_strategies("exact_resume", folder=str(tmp_path), resume=True), tokens())


def test_without_resume_a_run_begins_anew_whatever_ended_there(tmp_path):
    """As the processes of a measured row must, which share the folder."""
    parts = with_strategies("exact_resume", folder=str(tmp_path))
    for source in (tokens(), tokens(), tokens(seed=1, shuffle=True)):
        assert_equal(first(parts, source, 3), first(PLAIN, source, 3))
        assert json.loads((tmp_path / "position.json").read_text())["batches"] == 3


def test_an_answer_is_compared_without_a_position():
    strategy = STRATEGIES["exact_resume"]
    knobs = strategy.probed({"folder": "run", "resume": True, "every": 2}, None, None)
    assert knobs == {"folder": "", "resume": False, "every": 2}


def test_ranks_may_write_at_once(tmp_path, monkeypatch):
    """Another process writes and is done while this one has not put its file in place."""
    path = tmp_path / "position.json"

    def other_rank(descriptor):
        monkeypatch.undo()
        exact_resume.write(path, 3, {})

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "fsync", other_rank)
    exact_resume.write(path, 3, {})
    assert json.loads(path.read_text()) == {"batches": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["position.json"]


def test_a_position_is_not_kept_of_blocks():
    pair = [STRATEGIES[name] for name in ("exact_resume", "hf_datasets")]
    assert "name it after" in str(conflict(pair)) and conflict(pair[::-1]) is None


RESUMED = """
import hashlib, os, sys, time
sys.path[:0] = [{tests!r}]
import test_batches as tests
import numpy as np
names, folder = {names!r}, {folder!r}
parts = tests.with_strategies(*names)
parts = tests.STRATEGIES["exact_resume"].on["torch"](parts, folder=folder, resume=True)
log = open(folder + "/log", "a")
print("begun", flush=True)
for x, y in tests.flow(parts, tests.tokens(shuffle=True)):
    time.sleep(0.002)
    log.write(hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest() + "\\n")
    log.flush()
    os.fsync(log.fileno())
"""


@pytest.mark.long
@pytest.mark.parametrize("names", [("global_shuffle",), ("chunked_shuffle", "prefetch_thread")], ids="+".join)
def test_a_run_that_is_killed_again_and_again_consumes_what_one_does_that_is_not(tmp_path, names):
    """Each process logs a batch after it consumed it, then its position is written.

    So one that is killed between the two has logged one batch more than its position says, and the next process begins
    with that very batch; otherwise it begins with the one after. Nothing is left out, nothing comes a third time
    unless the process was killed again before it could write.
    """
    import hashlib

    due = [
        hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
        for x, y in first(with_strategies(*names), tokens(shuffle=True), 400)
    ]
    script = RESUMED.format(tests=os.path.dirname(__file__), names=names, folder=str(tmp_path))
    log, dice, position, killed = tmp_path / "log", random.Random(7), 0, 0
    while position < 100 or killed < 4:
        before = len(log.read_text().splitlines()) if log.exists() else 0
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "begun\n"
            time.sleep(dice.uniform(0.05, 0.3))
            process.kill()
        killed += 1
        file = tmp_path / "position.json"
        state = json.loads(file.read_text())["batches"] if file.exists() else 0
        result = log.read_text().splitlines()[before:]
        # began where the file said, went on without a gap, and the file is at most one batch behind
        assert result == due[position : position + len(result)]
        assert position + len(result) - state in (0, 1)
        position = state
        assert killed < 60, f"only {position} of 100 batches by then"


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("prefetch_thread", {"depth": 0}, "set depth"),
        ("prefetch_device", {"depth": 0}, "set depth"),
        ("prefetch_process", {"workers": 0}, "workers and depth"),
        ("prefetch_shared", {"depth": 0}, "workers and depth"),
        ("exact_resume", {"every": 0}, "set every"),
        ("exact_resume", {"resume": True}, "set folder"),
    ],
)
def test_knobs_that_mean_nothing_are_refused(name, knobs, message):
    with pytest.raises(ValueError, match=message):
        with_strategies(name, **knobs)


@pytest.mark.parametrize("name", SAME)
def test_a_source_smaller_than_a_batch_is_refused(name):
    with pytest.raises(ValueError, match="fewer than one batch"):
        next(flow(with_strategies(name), tokens(n=6)))


def extent_of(source):
    sizes = (source.inputs[0].nbytes, source.targets[0].nbytes)
    return Extent(len(source.inputs), *sizes, source.window, source.stride, source.batch)


def settled(size, says):
    """The size when what runs ahead has come as far as it said, and had the time to go further."""
    end = time.monotonic() + 10
    while size() < 0.95 * says and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    return size()


@pytest.mark.parametrize("name", [name for name in SAME if name not in PROCESSES])
def test_what_they_keep_beside_the_batch_in_use_is_what_they_say(name):
    source = frames(n=4000, features=64, window=32, batch=32)
    parts = STRATEGIES[name].on["torch"](PLAIN)
    first(parts, source, 1)  # what is imported at first use is not charged
    says = STRATEGIES[name].holds(extent_of(source))
    tracemalloc.start()
    try:
        batches = flow(parts, source)
        next(batches)
        in_use = next(batches)
        of_batch = sum(array.nbytes for array in in_use)
        size = settled(lambda: tracemalloc.get_traced_memory()[0] - of_batch, says.batches)
        batches.close()
    finally:
        tracemalloc.stop()
    assert size == pytest.approx(says.batches, rel=0.05, abs=32 << 10)
    assert (says.source, says.windows, says.making) == (None, 0, 0)


def test_each_worker_process_holds_the_rows_and_the_batches_that_wait():
    """What `prefetch_shared` holds is counted above, where its rows are read."""
    sources = [frames(n=10, features=64), frames(n=60_000, features=64, window=64, batch=64)]
    says, taken = [], []
    for source in sources:
        holding = STRATEGIES["prefetch_process"].holds(extent_of(source))
        says.append(holding.windows + holding.batches)
        before = running()[1]
        batches = flow(STRATEGIES["prefetch_process"].on["torch"](PLAIN), source)
        for _ in islice(batches, 2):  # one of each worker
            pass
        workers = running()[1] - before
        taken.append(settled(lambda workers=workers: sum(map(anonymous, workers)), sum(taken) + says[-1]))
        batches.close()
    assert taken[1] - taken[0] == pytest.approx(says[1] - says[0], rel=0.05)


def anonymous(pid):
    """The bytes of a process that no file backs."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous:"))
