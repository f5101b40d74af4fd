"""Workers that are forked: alike to fresh ones, fresh where a fork would not be, and nobody is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.machine import facts, memory, orphans
from harness.records import Case, Task
from harness.run import runner, template

alone = pytest.mark.alone
"""For what needs all cores: beside others, a process of the tests has one."""

SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "batch": 1, "tokens": 33}
MIB = 1 << 20
COUNTING = """
from pathlib import Path
with open(Path(__file__).with_suffix(".count"), "a") as file:
    file.write("x")
"""
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
CHILD = "import subprocess\nsubprocess.Popen(['sleep', '300'])\n"
DEAD = "import os, sys\nif 'template' in str(sys.orig_argv): os._exit(3)\n"


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without the templates that the other tests share."""
    monkeypatch.setattr(template, "_pool", template._Pool())


def task(*names: str, kind: str = "predict", place: str = "torch/cpu", **settings: object) -> Task:
    case = Case(workload="decoder", shape=SHAPE, place=place, corpus="drawn", tokenizer="none")
    common = {"run_id": "templates", "parent": os.getpid(), "folder": "", "plugins": names, **settings}
    return Task.model_validate({"kind": kind, "cases": (case,), **common})


def run(*names: str, **settings: object) -> str:
    """Run a task; return how its worker started."""
    (record,) = runner.run(task(*names, **settings), 1, 60.0)
    assert record.status == "ok", record.evidence
    return record.origin.start


SLOW_TO_LOAD = """
import sys
from dataclasses import replace
from pathlib import Path
from harness import hookimpl
from harness.workloads import decoder
sys.path.append(str(Path(__file__).parent))
@hookimpl
def harness_workloads():
    workload, *_ = decoder.harness_workloads()
    return [replace(workload, name="slow_to_load", imports=("no_such_module", "counted"))]
"""


def left() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.long
def test_workers_are_forked_where_templates_are_kept_one_that_was_killed_is_replaced_and_nobody_is_left() -> None:
    before = left()
    assert run() == "fresh"
    with template.forking():
        assert [run(), run()] == ["forked", "forked"]
        (pid,) = template.processes()
        most = 400 if "cpu" in facts.versions()["torch"] else 800  # a build for GPUs is larger
        assert memory.read(pid).rss < most * MIB
        assert left() - before == {pid}

        os.kill(pid, signal.SIGKILL)
        while not orphans._over(pid):
            time.sleep(0.01)
        assert run() == "forked"
        assert template.processes() != {pid}
        killed = []

        def kill(phase: str) -> None:
            if not killed and phase != "starting":
                killed.extend(template.processes())
                os.kill(killed[0], signal.SIGKILL)

        (record,) = runner.run(task(kind="memory", steps=5), 1, 60.0, kill)
        assert record.status == "ok" and killed, "a worker outlives its template"
    assert left() <= before


def test_a_worker_of_a_gpu_is_forked_before_anything_has_started_it() -> None:
    with template.forking():
        (record,) = runner.run(task(kind="memory", place="torch/cuda"), 1, 60.0)
    assert record.origin.start == "forked"


@pytest.mark.parametrize("kind", ["predict", "contract"])
@pytest.mark.parametrize("start", ["fresh", "forked"])
def test_a_plugin_is_executed_once_in_each_process(kind: str, start: str, tmp_path) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    times = {"fresh": 1, "forked": 2}[start]
    with template.forking() if start == "forked" else template.suspended():
        starts = [run(str(tmp_path / "counting.py"), kind=kind) for _ in range(times)]
    assert starts == [start] * times
    assert len((tmp_path / "counting.count").read_text()) == 1


@pytest.mark.long
@pytest.mark.parametrize("code", [THREAD, CHILD, DEAD], ids=["thread", "child", "death"])
def test_a_plugin_that_cannot_be_forked_is_measured_in_fresh_workers(code: str, tmp_path) -> None:
    (tmp_path / "odd.py").write_text(code)
    before = left()
    with template.forking():
        assert run(str(tmp_path / "odd.py")) == "fresh"
        assert left() <= before, "a template that is of no use is kept, or what it started"
        assert run(str(tmp_path / "odd.py")) == "fresh"
        assert run() == "forked"


def test_a_worker_that_somebody_else_has_waited_for_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    _, status = os.waitpid(process.pid, 0)  # as another thread does that ends what was left over
    process.returncode = os.waitstatus_to_exitcode(status)
    assert template.Forked(process.pid).wait(timeout=5) == 0


@pytest.mark.long
def test_a_template_that_stops_answering_costs_seconds_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "ANSWER_SECONDS", 0.5)
    with template.forking():
        assert run() == "forked"
        (pid,) = template.processes()
        os.kill(pid, signal.SIGSTOP)
        assert run() == "fresh"
        assert not template.processes()


@pytest.mark.long
def test_no_more_than_a_handful_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "KEPT", 1)
    with template.forking():
        for _ in range(2):
            assert run() == "forked"
        (first,) = template.processes()
        assert run(kind="memory") == "forked"
        assert len(template.processes()) == 1 and first not in template.processes()


@alone
def test_forked_workers_draw_anew_search_for_garbage_and_have_their_own_threads(tmp_path) -> None:
    (tmp_path / "drawing.py").write_text(
        "import gc, os, threading\nimport numpy as np\nfrom harness import hookimpl\n"
        "searched = gc.isenabled()\n"
        "@hookimpl(wrapper=True)\ndef harness_measure(task):\n"
        "    record = yield\n"
        "    made = {'drawn': float(np.random.rand()), 'threads': len(os.listdir('/proc/self/task')),\n"
        "            'searched': searched, 'searches': gc.isenabled(),\n"
        "            'open': len(os.listdir('/proc/self/fd')), 'session': os.getsid(0) == os.getpid(),\n"
        "            'parent': os.getppid() == task.parent, 'folder': os.environ['TMPDIR'] == task.folder}\n"
        "    return record.model_copy(update={'extra': made})\n"
    )
    found = {}
    for start in ("forked", "fresh"):
        with template.forking() if start == "forked" else template.suspended():
            records = [runner.run(task(str(tmp_path / "drawing.py")), 2, 60.0)[0] for _ in range(2)]
        assert [record.origin.start for record in records] == [start] * 2
        assert records[0].extra["drawn"] != records[1].extra["drawn"]
        assert records[0].extra["searched"] is (start == "fresh"), "a template imports without a search"
        found[start] = {name: value for name, value in records[0].extra.items() if name not in ("drawn", "searched")}
        assert all(found[start][name] is True for name in ("session", "parent", "folder", "searches"))
    assert found["forked"] == found["fresh"]


@alone
@pytest.mark.long_in_jax
@pytest.mark.parametrize("place", ["torch/cpu", "jax/cpu"])
def test_the_peak_of_a_forked_worker_is_that_of_a_fresh_one(place: str) -> None:
    peaks = {}
    for start in ("forked", "fresh"):
        with template.forking() if start == "forked" else template.suspended():
            (record,) = runner.run(task(kind="memory", place=place), 1, 120.0)
        assert (record.status, record.origin.start) == ("ok", start)
        peaks[start] = record.memory.peak_host_bytes or 0
    assert abs(peaks["forked"] - peaks["fresh"]) < memory.resolution_bytes(), peaks


HARNESS = """
import sys
from harness.records import Task
from harness.run import runner, template
with template.forking():
    runner.run(Task.model_validate_json(sys.argv[1]), 1, 60.0)
    print("done", flush=True)
    sys.stdin.read()
"""


@alone
@pytest.mark.parametrize("moment", ["importing", "waiting"])
def test_templates_end_with_a_harness_that_is_killed(moment: str) -> None:
    command = [sys.executable, "-c", HARNESS, task().model_dump_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if moment == "waiting":
            assert process.stdout.readline() == "done\n"
        wanted = f"HARNESS_OF={process.pid}:"
        mark = wanted.removeprefix("HARNESS_OF=")

        def carriers() -> list[int]:
            marks = {pid: orphans._mark_of(pid) for pid in orphans._processes()}
            return [pid for pid, each in marks.items() if each and each.startswith(mark) and not orphans._over(pid)]

        until = time.monotonic() + 30
        while not carriers() and time.monotonic() < until:
            time.sleep(0.02)
        assert carriers()
        process.kill()
    until = time.monotonic() + 1
    while carriers() and time.monotonic() < until:
        time.sleep(0.02)
    assert carriers() == []


@pytest.mark.long
def test_many_workers_load_once_what_a_workload_takes_long_to_load(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTING)
    (tmp_path / "slow.py").write_text(SLOW_TO_LOAD)

    def loaded_for(kind: str, times: int) -> int:
        case = Case(workload="slow_to_load", shape=SHAPE, place="torch/cpu", corpus="drawn", tokenizer="none")
        this = task(str(tmp_path / "slow.py"), kind=kind).model_copy(update={"cases": (case,)})
        records = [runner.run(this, 1, 60.0)[0] for _ in range(times)]
        assert [(record.status, record.origin.start) for record in records] == [("ok", "forked")] * times
        count = tmp_path / "counted.count"
        return len(count.read_text()) if count.exists() else 0

    with template.forking():
        assert loaded_for("memory", 2) == 1
        assert loaded_for("predict", 2) == 2, "in a template of its own"


def test_what_is_imported_late_is_there_and_garbage_is_searched_for_again(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text('{"kind": "predict", "cases": [{"workload": "mine"}]}')
    program = (
        "import gc, sys\n"
        "from types import SimpleNamespace as Made\n"
        "from harness.worker import template\n"
        "loaded = Made(workloads={'mine': Made(imports=('no_such_module', 'colorsys'))})\n"
        f"template._import_more({str(spec)!r}, loaded)\n"
        "print('colorsys' in sys.modules, gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
