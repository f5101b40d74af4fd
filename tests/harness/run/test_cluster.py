"""Fan-out over Dask: the same results as here, one group on one machine, nothing lost and nobody left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness import backends
from harness.contract import plugins
from harness.machine import facts, orphans
from harness.records import Record, Slot, store
from harness.run import cluster_worker, schedule
from harness.run.bench import Options, Progress
from harness.run.cluster import FanOut, _refuse, finished
from harness.run.schedule import Schedule, Summary
from harness.suite import reader

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
pytestmark = pytest.mark.long

SUITE = """
title: As small as it gets
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: [64, 96]}
strategies: [checkpoint]
rounds: 1
warmup: 1
steps: 3
"""
WITH_CUDA = SUITE.replace("[torch/cpu]", "[torch/cpu, torch/cuda]")
GROUPS, CASES = 2, 4
PATIENCE = 20.0
"""Seconds that an ending may take beside other tests."""
# Takes the place of every measurement, so that a case takes no second. Memory is made up within a worker of its case,
# forked where a test asks for it, all else within the process that would start a worker. Each process of the cluster
# can pass for a machine of its own.
PLUGIN = '''
"""Figures that are made up; a case can be held, and can kill the process that started its worker."""

import json, os, signal, sys, time
from pathlib import Path

from harness import hookimpl
from harness.records import Memory, Origin, Prediction, Record, Times
from harness.records.record import Verdict

HERE = Path(__file__).parent
MADE = {
    "predict": {"prediction": Prediction(predicted_peak_bytes=1 << 20, floor_bytes=1 << 19)},
    "numerics": {"numerics": Verdict("bit_exact", 1.0, None, None, None, (), "it is")},
    "memory": {"memory": Memory(peak_host_bytes=1 << 20, losses=(1.0, 0.9, 0.8), resolution_bytes=1 << 12)},
    "time": {"times": Times(step_seconds=(0.1, 0.1, 0.1))},
}


def made_up(task, parent):
    began, case = time.monotonic(), task.case
    if task.kind == "reference":
        Path(task.reference).mkdir()
    if task.kind == "memory" and case.strategies and case.shape["tokens"] == 96:
        if (HERE / "fatal").exists():
            os.kill(parent, signal.SIGKILL)
            time.sleep(60)
        while (HERE / "hold").exists():
            (HERE / "holding").write_text(json.dumps([os.getpid(), parent]))
            (HERE / "holding").rename(HERE / "held")  # whole, or not there
            time.sleep(0.05)
    with open(HERE / "spans", "a") as spans:
        spans.write(json.dumps([parent, began, time.monotonic()]) + "\\n")
    name = {"name": f"machine-{parent}"} if (HERE / "many").exists() else {}
    return Record(**MADE.get(task.kind, {}), origin=Origin(machine=name, worker_seconds=0.1))


@hookimpl(tryfirst=True)
def harness_measure(task):
    return made_up(task, os.getppid())


def instead_of_workers():
    from harness.run import runner, template

    begin = getattr(runner.run, "real", runner.run)  # this file is loaded for each comparison

    def run(task, threads, deadline, watch):
        if task.kind == "memory":
            return begin(task, threads, deadline, watch)
        watch("made up")
        return [made_up(task.model_copy(update={"cases": (case,)}), os.getpid()) for case in task.cases]

    run.real, runner.run = begin, run
    if not (HERE / "forked").exists():
        template.ready = lambda *rest: "without a framework a worker starts at once"


if "harness.worker.process" not in sys.modules:
    instead_of_workers()
'''
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
# A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
HARNESS = [sys.executable, "-c", f"{LISTENING}; from harness.cli.commands import main; main()"]


@dataclass(frozen=True)
class Place:
    """A folder to run in, with all that a run leaves anywhere."""

    folder: Path
    cache: Path

    @property
    def env(self) -> dict[str, str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "XDG_CACHE_HOME": str(self.cache), "TMPDIR": str(temporary), "COLUMNS": "60"}

    @contextmanager
    def start(self, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
        """Start a run; it does not survive a test that fails."""
        command = [*HARNESS, "run", "small.yaml", "--plugin", "made.py", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def records(self) -> list[Record]:
        """Read what is there, of the one file."""
        files = list((self.folder / "results").rglob("*.jsonl"))
        assert len(files) < 2
        return [record for file in files for record in store.read(file)[0] if record.slot]

    def memory_records(self, tokens: int) -> int:
        """Count the records of memory that a group has."""
        of_group = [record for record in self.records() if record.case and record.case.shape["tokens"] == tokens]
        return sum(record.slot.kind == "memory" for record in of_group if record.slot)

    def held(self) -> tuple[int, int]:
        """Wait for the case that is held: its worker, and the process of the cluster that started it.

        The measurement before it, the baseline's, has come by then: records come as they finish, not when their group
        does.
        """
        assert within(120, (self.folder / "held").exists)
        assert within(PATIENCE, lambda: self.memory_records(96) >= 1), "records come as they finish"
        worker, parent = json.loads((self.folder / "held").read_text())
        return worker, parent


def alive(pid: int) -> bool:
    return bool(orphans._began(pid)) and not orphans._over(pid)


def within(seconds: float, happened: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)
    return happened()


def left_over(place: Place) -> list[int]:
    """Find every process that some run in a folder started: all of them carry its folder for temporary files."""
    mark = f"{place.folder}/"
    found = []
    for pid in orphans._processes():
        try:
            told = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in told and not orphans._over(pid):
            found.append(pid)
    return found


def told(text: str) -> str:
    """Leave out of a table on which machine it was measured, and what else went on there."""
    return re.sub(r"\n+(Measured on |- .*flags: ).*", "", text)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with rates of this machine, which are worth no measurement here."""
    folder = tmp_path_factory.mktemp("cache")
    key = f"torch/cpu {facts.versions()['torch']} {facts.threads()} threads"
    (folder / "harness").mkdir()
    (folder / "harness" / f"rates-{facts.name()}.json").write_text(json.dumps({key: {}}))
    return folder


@pytest.fixture
def place(tmp_path: Path, cache: Path) -> Iterator[Place]:
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "made.py").write_text(PLUGIN)
    found = Place(tmp_path, cache)
    yield found
    assert within(PATIENCE, lambda: not left_over(found)), "somebody outlived the run"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> str:
    """The table of a run without a cluster."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "small.yaml").write_text(SUITE)
    (folder / "made.py").write_text(PLUGIN)
    done = Place(folder, cache).run()
    assert done.returncode == 0, done.stderr
    return done.stdout


def machines_of(found: list[Record]) -> dict[int, set[str]]:
    """Name the machines of each group, as the last record of each slot has them; by its tokens."""
    last = {record.slot: record for record in found}
    groups: dict[int, set[str]] = {}
    for record in last.values():
        assert record.case is not None and record.slot is not None
        if record.slot.kind not in ("predict", "numerics") and record.status == "ok":  # both are shared
            groups.setdefault(record.case.shape["tokens"], set()).add(str(record.origin.machine["name"]))
    return groups


def test_a_cluster_gives_what_a_run_here_gives(place: Place, plain: str) -> None:
    (place.folder / "many").touch()
    done = place.run("--cluster", "local:2")
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == told(plain)
    found = place.records()
    assert {record.status for record in found} == {"ok"}
    memory = {record.case.digest(): record.position for record in found if record.case and record.slot.kind == "memory"}
    assert sorted(memory.values()) == list(range(CASES)), "each has its row"
    machines = machines_of(found)
    assert len(machines) == GROUPS and all(len(names) == 1 for names in machines.values())
    assert len(set.union(*machines.values())) == 2, "both processes had a group"
    for name in set.union(*machines.values()):
        assert f"\n\nMeasured on {name}.\n\n" in done.stdout
    assert "mixed" not in done.stdout
    spans = [json.loads(line) for line in (place.folder / "spans").read_text().splitlines()]
    assert len({pid for pid, *_ in spans}) == 2
    by_start = sorted(spans, key=lambda span: span[1])
    changes = sum(one[0] != other[0] for one, other in pairwise(by_start))
    assert changes == 1, "one measured while the other did: they share this machine, whatever they say"


def test_a_worker_that_is_killed_loses_nothing_and_leaves_nobody(place: Place, plain: str) -> None:
    for each in ("hold", "many", "forked"):
        (place.folder / each).touch()
    with place.start("--cluster", "local:2") as process:
        worker, dask = place.held()
        before = place.records()
        os.kill(dask, signal.SIGKILL)
        assert within(PATIENCE, lambda: not alive(worker)), "the worker of the case outlived the one that started it"
        (place.folder / "hold").unlink()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "was lost: its comparison is run again" in err and "Traceback" not in err
    assert told(out) == told(plain)
    after = place.records()
    assert after[: len(before)] == before, "what came stays as it was"
    machines = machines_of(after)
    assert all(len(names) == 1 for names in machines.values()), "a group of two machines"
    assert machines[96] != {f"machine-{dask}"}
    again = [
        record for record in after if record.case and record.case.shape["tokens"] == 96 and record.origin.attempt > 1
    ]
    assert Counter(r.status for r in again if r.slot and r.slot.kind == "memory") == {"killed_unknown": 1, "ok": 1}
    assert "mixed" not in out


@pytest.mark.slow
def test_a_group_that_kills_its_worker_again_and_again_is_given_up(place: Place) -> None:
    (place.folder / "fatal").touch()
    done = place.run("--cluster", "local:2")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "was given up: its worker was lost 3 times" in done.stderr
    first, second = done.stdout.split("\n## ")[1:]
    assert first.count("| bit_exact | baseline") == 1 and "killed_unknown" not in first
    assert second.count("killed_unknown") == 2 and second.count("its worker was lost 3 times") == 2
    (place.folder / "fatal").unlink()
    again = place.run("--cluster", "local:2")
    assert again.returncode == 0 and "killed_unknown" not in again.stdout, "the next run tries it again"


def test_ctrl_c_keeps_what_came_and_the_same_command_resumes(place: Place, plain: str) -> None:
    (place.folder / "hold").touch()
    with place.start("--cluster", "local:1") as process:
        place.held()
        before = place.records()
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the foreground
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert err.splitlines()[-1] == "interrupted: what is measured is kept; the same command resumes"
    assert within(PATIENCE, lambda: not left_over(place)), "somebody outlived the run"
    assert place.records() == before
    (place.folder / "hold").unlink()
    resumed = place.run("--cluster", "local:1")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stderr.startswith("resuming: ")
    assert told(resumed.stdout) == told(plain)
    assert "Measured on" not in resumed.stdout, "there is one machine"
    after = place.records()
    counts = Counter(record.slot for record in after if record.case and record.case.shape["tokens"] == 64)
    own = [count for slot, count in counts.items() if slot and slot.kind in ("predict", "memory")]
    assert own == [1] * 4, "a finished group was run again"
    assert len({record.origin.run_id for record in after if record.case and record.case.shape["tokens"] == 96}) == 2
    last = [record for record in {record.slot: record for record in after}.values() if record.case]
    runs = {record.origin.run_id for record in last if record.case and record.case.shape["tokens"] == 96}
    assert runs == {after[-1].origin.run_id}, "a group was resumed by halves"


@pytest.mark.parametrize("endings", [[signal.SIGINT] * 3, [signal.SIGTERM], [signal.SIGKILL]], ids=str)
def test_however_a_run_ends_its_cluster_ends_with_it(place: Place, endings: list[signal.Signals]) -> None:
    (place.folder / "hold").touch()
    if signal.SIGKILL in endings:  # nobody is left to end the templates of the workers
        (place.folder / "forked").touch()
    with place.start("--cluster", "local:2") as process:
        place.held()
        before = place.records()
        for ending in endings:
            process.send_signal(ending)
            time.sleep(0.3)
        _, err = process.communicate(timeout=100)
    assert "Traceback" not in err, err
    assert within(PATIENCE, lambda: not left_over(place)), "somebody outlived the run"
    assert place.records() == before != []


def test_what_this_machine_lacks_is_for_others_to_say(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = plugins.load()
    plan = reader.read(place.folder / "small.yaml", loaded)
    monkeypatch.setattr(schedule, "obstacle", lambda *case: "there is no such place")
    there, here = (Schedule(plan, loaded, 1, elsewhere=elsewhere) for elsewhere in (True, False))
    assert there.plan_digest != here.plan_digest, "one is not resumed as the other"
    memory = [slot for slot in there.slots() if slot.kind == "memory"]
    assert list(finished(there, {})) == [False] * GROUPS
    assert list(finished(there, dict.fromkeys(memory, Summary("ok")))) == [False] * GROUPS, "there are no answers yet"
    assert list(finished(there, dict.fromkeys(memory[:2], Summary("unsupported")))) == [True, False]
    whole = dict.fromkeys(there.slots(), Summary("ok"))
    assert list(finished(there, whole)) == [True] * GROUPS
    assert list(finished(there, whole | {memory[3]: Summary("skipped_guard")})) == [True] * GROUPS
    assert list(finished(there, whole | {memory[3]: Summary("killed_unknown")})) == [True, False]


def test_all_that_a_lost_worker_measured_is_withdrawn(place: Place) -> None:
    loaded = plugins.load()
    there = Schedule(reader.read(place.folder / "small.yaml", loaded), loaded, 1, elsewhere=True)
    first, second = there.plan.comparisons
    case, other = there.digest(first.cases[1]), there.digest(second.cases[1])
    extra = [Slot(case=case, kind="memory", repeat=1), Slot(case=case, kind="time", block=1)]
    elsewhere = Slot(case=other, kind="memory", repeat=1)
    latest = dict.fromkeys([*there.slots(), *extra, elsewhere], Summary("ok"))
    path = place.folder / "withdrawn.jsonl"
    fan_out = FanOut("", None, there, Options(place.folder), Progress(), "run", path, latest)
    fan_out.withdraw(first, "its worker was lost")
    left = {slot for slot, known in latest.items() if known.status == "ok" and slot.kind in ("memory", "time")}
    withdrawn = set(map(there.digest, first.cases))
    assert not [slot for slot in left if slot.case in withdrawn] and elsewhere in left
    withdrawn = [record.slot for record in store.read(path)[0]]
    assert set(extra) <= set(withdrawn) and len(withdrawn) == len(set(withdrawn)) == 6


class Heard(Progress):
    """What a watcher heard: who is timed together for how long, and what is left."""

    def __init__(self) -> None:
        self.timed: list[tuple[frozenset[str], float]] = []
        self.open: list[set[Slot]] = []

    def groups(self, groups: Sequence[frozenset[str]], seconds: Sequence[float]) -> None:
        self.timed = list(zip(groups, seconds, strict=True))

    def left(self, slots: Sequence[Slot]) -> None:
        self.open.append(set(slots))


def test_a_watcher_hears_who_is_timed_together_and_what_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def subscribe_topic(self, *rest: object) -> None: ...

        def cancel(self, *rest: object, **options: object) -> None: ...

    loaded = plugins.load()
    there = Schedule(reader.read(place.folder / "small.yaml", loaded), loaded, 1, elsewhere=True)
    heard = Heard()
    fan_out = FanOut("", Client(), there, Options(place.folder), heard, "run", place.folder / "r.jsonl", {})

    def receive() -> None:
        number = next(iter(fan_out.tasks))
        fan_out.latest |= dict.fromkeys(fan_out.slots(fan_out.comparisons[number]), Summary("ok", seconds=1.0))
        if number in fan_out.attempts:  # a message, and then the end
            del fan_out.tasks[number]
        fan_out.attempts[number] = "token"

    monkeypatch.setattr(fan_out, "submit", lambda number: fan_out.tasks.update({number: None}))
    monkeypatch.setattr(fan_out, "receive", receive)
    fan_out.run()
    groups = [frozenset(map(there.digest, comparison.cases)) for comparison in there.plan.comparisons]
    assert heard.timed == [(group, 600.0) for group in groups]
    second = fan_out.slots(there.plan.comparisons[1])
    assert heard.open == [second, set()], "what was answered for the first is asked for again: it may be elsewhere"


def test_code_of_another_plugin_is_refused(place: Place) -> None:
    plugin = place.folder / "made.py"
    plugin.write_text("from harness import hookimpl\n")
    here = cluster_worker.Code.here(plugins.load((str(plugin),)))
    here.refuse_other(cluster_worker.Code.here(plugins.load((str(plugin),))), "the worker")
    plugin.write_text("from harness import hookimpl  # another\n")
    with pytest.raises(cluster_worker.ClusterError, match=r"the worker has other code \(digest is "):
        here.refuse_other(cluster_worker.Code.here(plugins.load((str(plugin),))), "the worker")


@pytest.mark.parametrize("offering", [5, None], ids=["the sixth", "none"])
def test_every_worker_is_asked_whether_it_offers_a_gpu(place: Place, offering: int | None) -> None:
    class Client:
        def wait_for_workers(self, *rest: object, **options: object) -> None: ...

        def scheduler_info(self, n_workers: int = 5) -> dict[str, Any]:
            resources = [{"gpu": 1} if number == offering else {} for number in range(6)]
            workers = [(f"tcp://{number}", {"resources": each}) for number, each in enumerate(resources)]
            return {"workers": dict(workers if n_workers == -1 else workers[:n_workers])}

        def run(self, *rest: object, **options: object) -> dict[str, object]:
            return {}

    (place.folder / "small.yaml").write_text(WITH_CUDA)
    loaded = plugins.load()
    there = Schedule(reader.read(place.folder / "small.yaml", loaded), loaded, 1, elsewhere=True)
    try:
        _refuse("tcp://host", Client(), there, ())
    except cluster_worker.ClusterError as error:
        assert offering is None and "no worker of 'tcp://host' offers the resource gpu" in str(error)
    else:
        assert offering == 5


@pytest.mark.parametrize(
    ("workers", "open_", "words"),
    [
        ([], {0, 2}, "no worker is left at 'tcp://host': what is measured is kept"),
        ([{}], {2, 3}, "no worker that offers the resource gpu is left at 'tcp://host': what is measured is kept"),
        ([{}], {0, 2}, None),
        ([{}] * 5 + [{"gpu": 1}], {2, 3}, None),
        ([{"gpu": 1}], {0, 1}, None),
    ],
)
def test_a_run_ends_where_no_worker_is_left_for_what_is_open(
    place: Place, workers: list[dict[str, int]], open_: set[int], words: str | None
) -> None:
    class Client:
        def scheduler_info(self, n_workers: int = 5) -> dict[str, Any]:
            known = [(f"tcp://{number}", {"resources": each}) for number, each in enumerate(workers)]
            return {"workers": dict(known if n_workers == -1 else known[:n_workers])}

    (place.folder / "small.yaml").write_text(WITH_CUDA)
    loaded = plugins.load()
    there = Schedule(reader.read(place.folder / "small.yaml", loaded), loaded, 1, elsewhere=True)
    assert [each.baseline.place.device for each in there.plan.comparisons] == ["cpu"] * 2 + ["cuda"] * 2
    fan_out = FanOut("tcp://host", Client(), there, Options(place.folder), Progress(), "run", place.folder / "r", {})
    fan_out.tasks |= dict.fromkeys(open_)
    try:
        fan_out.refuse_without_workers()
    except cluster_worker.ClusterError as error:
        assert words is not None and str(error).startswith(words)
    else:
        assert words is None


# A cluster that is there already


@contextmanager
def cluster(place: Place, *options: str, workers: int = 1, path: str = "") -> Iterator[str]:
    """Start a scheduler and workers as a user does, and give their address; end them."""
    file = place.folder / "scheduler.json"
    env = {**place.env, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))}
    started = [["distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]]
    started += [["distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard", *options]] * workers
    log = place.folder / "cluster.log"
    with open(log, "w") as told:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *words, "--scheduler-file", str(file)],
                cwd=place.folder,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=told,
            )
            for words in started
        ]
    try:
        assert within(60, lambda: file.exists() and file.read_text().endswith("}"))
        assert within(60, lambda: log.read_text().count(" Registered to:") == workers), log.read_text()
        yield json.loads(file.read_text())["address"]
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            process.wait(30)


def test_ctrl_c_ends_what_runs_on_a_cluster_that_stays(place: Place, plain: str) -> None:
    (place.folder / "hold").touch()
    with cluster(place) as address:
        for ending in (signal.SIGINT, signal.SIGKILL):
            (place.folder / "held").unlink(missing_ok=True)
            with place.start("--cluster", address) as process:
                worker, dask = place.held()
                process.send_signal(ending)
                process.communicate(timeout=100)
            assert within(PATIENCE, lambda worker=worker: not alive(worker)), "a case went on that nobody waits for"
            assert alive(dask)
        (place.folder / "hold").unlink()
        done = place.run("--cluster", address)
        assert done.returncode == 0, done.stderr
        assert told(done.stdout) == told(plain)


def sentence(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("harness: "), done.stderr
    return lines[0]


def test_what_is_no_cluster_is_refused_in_a_sentence(place: Place) -> None:
    assert "'local:none' is no cluster" in sentence(place.run("--cluster", "local:none"))
    assert "no cluster answers at 'tcp://127.0.0.1:1'" in sentence(place.run("--cluster", "tcp://127.0.0.1:1"))
    assert "no cluster answers at 'localhost:1'" in sentence(place.run("--cluster", "localhost:1"))
    assert "no cluster answers at 'udp://nowhere'" in sentence(place.run("--cluster", "udp://nowhere"))
    with cluster(place, workers=0) as address:
        assert "has no worker: start one with `dask worker tcp" in sentence(place.run("--cluster", address))
    assert place.records() == []


def test_a_place_on_a_gpu_goes_to_a_worker_that_offers_one(place: Place) -> None:
    (place.folder / "small.yaml").write_text(WITH_CUDA)
    with cluster(place, "--resources", "gpu=1") as address:
        done = place.run("--cluster", address)
    assert done.returncode == 0, done.stderr
    assert "resuming" not in done.stderr
    if backends.absent("torch", "cuda") is not None:
        assert done.stdout.count("Untested: ") == 2, "the worker says what it lacks"


def test_a_scheduler_that_is_lost_is_a_sentence_and_loses_nothing(place: Place) -> None:
    (place.folder / "hold").touch()
    with cluster(place) as address:
        with place.start("--cluster", address) as process:
            worker, _ = place.held()
            before = place.records()
            os.kill(scheduler_of(place), signal.SIGKILL)
            out, err = process.communicate(timeout=100)
        assert process.returncode == 2 and "Traceback" not in err, err
        assert f"harness: the connection to '{address}' was lost: what is measured is kept;" in err.splitlines()[-1]
        assert out == "" and place.records() == before != []
        assert within(PATIENCE, lambda: not alive(worker)), "a case went on that nobody waits for"


def scheduler_of(place: Place) -> int:
    (found,) = (pid for pid in left_over(place) if b"dask_scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def test_a_worker_with_other_versions_or_without_the_gpu_is_refused(place: Place) -> None:
    other = place.folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda name: '0.1' if name == 'torch' else real(name)\n"
    )
    with cluster(place, path=str(other)) as address:
        refused = sentence(place.run("--cluster", address))
        (place.folder / "small.yaml").write_text(WITH_CUDA)
        lacks = sentence(place.run("--cluster", address))
    assert "has other code (torch is 0.1 there and " in refused and "install the same versions" in refused
    assert "offers the resource gpu for the place torch/cuda" in lacks and "--resources gpu=1" in lacks


def test_without_the_package_the_sentence_names_it(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SUITE)
    absent = "import sys; sys.modules['distributed'] = None; from harness.cli.commands import main; main()"
    command = [sys.executable, "-c", absent, "run", "small.yaml", "--cluster", "local:2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "install it, or the extra 'cluster'" in sentence(done)


def test_the_command_line_loads_dask_only_for_a_cluster() -> None:
    code = "import sys, harness.cli.run; print({'dask', 'distributed', 'tornado'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.slow
def test_a_real_suite_comes_to_the_same_cases_and_answers(tmp_path: Path, cache: Path) -> None:
    def rows(name: str, *arguments: str) -> list[list[str]]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "small.yaml").write_text(SUITE)
        command = [*HARNESS, "run", "small.yaml", *arguments]
        done = subprocess.run(command, cwd=folder, env=Place(folder, cache).env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        cells = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("| base", "| `"))]
        return [[row[1].strip(), row[-3].strip()] for row in cells]

    here = rows("here")
    assert len(here) == CASES
    assert rows("there", "--cluster", "local:2") == here


def test_answers_that_cannot_be_stored_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    answers = cluster_worker._Answers(tmp_path / "cache", "run")
    answers.write({Slot(case="a", kind="numerics"): Summary("ok")})
    assert answers.read() == {}


@pytest.mark.parametrize(("fresh", "words"), [(False, "the same command resumes"), (True, "without --fresh resumes")])
def test_a_run_that_cannot_go_on_says_which_command_resumes_it(place: Place, fresh: bool, words: str) -> None:
    class Client:
        def scheduler_info(self, n_workers: int = 5) -> dict[str, Any]:
            return {"workers": {}}

    loaded = plugins.load()
    there = Schedule(reader.read(place.folder / "small.yaml", loaded), loaded, 1, elsewhere=True)
    options = Options(place.folder, fresh=fresh)
    fan_out = FanOut("tcp://host", Client(), there, options, Progress(), "run", place.folder / "r", {})
    fan_out.tasks[0] = None
    with pytest.raises(cluster_worker.ClusterError, match=f"{words}$"):
        fan_out.refuse_without_workers()
