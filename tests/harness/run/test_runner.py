"""Real workers that misbehave: each is named for what it did, nothing of it stays, and the next one is unharmed.

They are forked, as those of a run are; that fresh ones behave alike is tested with `fresh`.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import psutil
import pytest

from harness.machine import environment
from harness.records import Applied, Case, Task
from harness.run import runner, template
from harness.worker.memory import untouched

SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "batch": 1, "tokens": 33}
LOGITS_MIB = 64
LARGE = {**SHAPE, "vocabulary": 1 << 14, "tokens": 1024}
"""Logits of 64 MiB, and little beside them."""
MIB = 1 << 20
BOUND = 60.0

PLUGIN = '''
"""Strategies that misbehave in one part of the real run, in the priming run before it, or in place of both."""

import ctypes, json, os, signal, subprocess, sys, time
from dataclasses import replace
from pathlib import Path

from harness import Strategy, hookimpl

HERE = Path(__file__).parent
OK = '{"status": "ok", "peak_host_bytes": 5, "losses": [1.0]}'


def value_error():
    raise ValueError("wrong on purpose\\nand more of it")


def memory_error():
    raise MemoryError("asked for too much")


def hang():
    (HERE / "hanging").write_text(str(os.getpid()))
    time.sleep(300)


def hang_ignoring_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def bad_alloc():
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
    os.abort()


def segfault():
    ctypes.string_at(0)


def exit_137():
    os.write(2, b"said at last\\n")
    os._exit(137)


def leave_a_grandchild():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    (HERE / "grandchild").write_text(str(child.pid))


def leave_a_nameless_grandchild():
    child = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True, env={})
    (HERE / "nameless").write_text(str(child.pid))
    os._exit(0)


def child():
    return subprocess.Popen([sys.executable, "-c", "block = bytearray(60 << 20); import time; time.sleep(0.5)"])


def children_in_turn():
    for _ in range(4):
        child().wait()
        time.sleep(0.3)


def children_at_once():
    for each in [child() for _ in range(4)]:
        each.wait()


def children_before_their_program():
    """A process of 200 MiB, whose children share its memory until a file opens and they execute a program."""
    import numpy as np

    block = np.ones(200 << 17)
    os.mkfifo(HERE / "gate")
    opener = subprocess.Popen(["/bin/sh", "-c", 'while sleep 0.05; do : > "$0"; done', HERE / "gate"])
    gate = [(os.POSIX_SPAWN_OPEN, 3, str(HERE / "gate"), os.O_RDONLY, 0)]
    for _ in range(40):
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=gate), 0)
    opener.kill()
    opener.wait()
    del block


def flood():
    for _ in range(70):
        os.write(1, bytes(1 << 20))
    time.sleep(300)


def spike(seconds):
    import numpy as np

    block = np.ones(200 << 17)
    time.sleep(seconds)
    del block


kept = []


def leak():
    import numpy as np

    kept.append(np.ones(4 << 17))


def short_spike():
    spike(0)


def long_spike():
    spike(0.5)


def long_spike_then_kill():
    spike(0.5)
    time.sleep(0.2)
    kill_itself()


def note_environment():
    (HERE / f"environ-{os.environ['HARNESS_RUN']}.json").write_text(json.dumps(dict(os.environ)))


def leave(text, end=lambda: os._exit(0)):
    def fault():
        Path(sys.argv[2]).write_bytes(text.encode())
        end()

    return fault


def fifo():
    os.unlink(sys.argv[2])
    os.mkfifo(sys.argv[2])
    os._exit(0)


def odd_phase():
    Path(sys.argv[2]).with_name("phase.json").write_text("[1]")
    os._exit(0)


FAULTS = {
    "none": lambda: None,
    "abort": os.abort,
    "real_time": lambda: os.kill(os.getpid(), signal.SIGRTMIN + 6),
    **{f.__name__: f for f in (
        value_error, memory_error, hang, hang_ignoring_sigterm, kill_itself, bad_alloc, segfault, exit_137,
        leave_a_grandchild, leave_a_nameless_grandchild,
        children_in_turn, children_at_once, children_before_their_program, flood, leak,
        short_spike, long_spike, long_spike_then_kill, note_environment,
    )},
    "fifo": fifo,
    "odd_phase": odd_phase,
    "no_result": leave(""),
    "broken": leave(OK[:-9]),
    "oversized": leave(OK[:-1] + ', "notes": {"a": "' + "a" * (1 << 20) + '"}}'),
    "nan": leave(OK.replace("1.0", "NaN")),
    "nan_unseen": leave(OK[:-1] + ', "extra": {"a": NaN}}'),
    "infinite_evidence": leave(OK[:-1] + ', "evidence": {"a": [1e999]}}'),
    "wrong_schema": leave('{"status": "splendid"}'),
    "two_results": leave(OK + "\\n" + OK + "\\n"),
    "ok_then_abort": leave(OK, os.abort),
}


def strategy(part):
    def on_any(parts, fault: str = "none", prime: str = "none"):
        inner = getattr(parts, part)
        chosen = fault if parts.shape.tokens == 33 else prime

        def faulty(*args, **kwargs):
            FAULTS[chosen]()
            return inner(*args, **kwargs)

        return replace(parts, **{part: faulty})

    return Strategy(f"bad_{part}", rewrites=(part,), on={"torch": on_any, "jax": on_any}, about="Misbehave.")


def other_loss(parts):
    return replace(parts, loss=lambda parts, x_BTD, w_VD, y_BT: (x_BTD.mean() * w_VD.mean()))


def untouched(parts, fault: str = "none"):
    return parts


@hookimpl
def harness_strategies():
    parts = [strategy(part) for part in ("source", "init", "loss", "step", "update")]
    whole = Strategy("bad_worker", rewrites=(), on={"torch": untouched}, about="Misbehave at once.")
    return [*parts, whole, Strategy("other_loss", rewrites=("loss",), on={"torch": other_loss}, about="Replace it.")]


@hookimpl
def harness_measure(task):
    """Misbehave before any framework is imported; leave every other task to the harness."""
    for applied in task.case.strategies:
        if applied.name == "bad_worker":
            FAULTS[applied.knobs["fault"]]()
'''

warm = set()
RUN = f"test-{os.getpid()}"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "faulty.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture(scope="module")
def templates():
    """Keep templates for all tests."""
    with template.forking():
        yield


@pytest.fixture
def run(plugin, templates):
    """Run one faulty worker; return its record, with the seconds it took, and find nothing of it alive."""

    def once(
        *applied, kind="memory", place="torch/cpu", budget=None, shape=SHAPE, deadline=BOUND, watch=None, steps=3,
        fresh=False,
    ):  # fmt: skip
        task = make(plugin, *applied, kind=kind, place=place, budget=budget, shape=shape, steps=steps)
        if not fresh and kind == "memory" and place not in warm:  # the seconds are those of a worker alone
            warm.add(place)
            runner.run(make(plugin, bad_worker("exit_137"), place=place), 1, BOUND)
        started = time.monotonic()
        with template.suspended() if fresh else nullcontext():
            (record,) = runner.run(task, 1, deadline, watch or (lambda phase: None))
        once.seconds = time.monotonic() - started
        assert record.origin.start == ("fresh" if fresh else "forked")
        assert alive(task.run_id) == []
        return record

    return once


def make(plugin, *applied, kind="memory", place="torch/cpu", budget=None, shape=SHAPE, steps=3):
    case = Case(
        workload="decoder",
        shape=shape,
        place=place,
        corpus="drawn",
        tokenizer="none",
        strategies=applied,
        budget_bytes=budget,
    )
    told = {"run_id": RUN, "parent": os.getpid(), "folder": "", "plugins": (str(plugin),), "steps": steps}
    return Task(kind=kind, cases=(case,), **told)


def bad(part, fault="none", prime="none"):
    return Applied(name=f"bad_{part}", knobs={"fault": fault, "prime": prime})


def bad_worker(fault):
    return Applied(name="bad_worker", knobs={"fault": fault})


def alive(run_id):
    """The processes of this machine that carry a run's id and have not ended, but for our templates."""
    found = []
    for process in (each for each in psutil.process_iter() if each.pid not in template.processes()):
        try:
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.environ().get(environment.RUN_VARIABLE) == run_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end(processes):
    """Kill and reap processes, but for templates, that this process, which adopts orphans, has been left with."""
    processes = [process for process in processes if process.pid not in template.processes()]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def comes_true(condition, seconds):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


# What a worker says of itself


def test_an_exception_is_an_error_with_its_type_first_line_and_phase(run):
    record = run(bad("update", "value_error"))
    assert record.status == "error"
    assert record.evidence["exception"] == "ValueError"
    assert record.evidence["message"] == "wrong on purpose"
    assert record.evidence["phase"] == "first_step/update"
    assert record.memory.peak_host_bytes is not None  # what was measured until then is kept


def test_an_exception_while_priming_names_that_phase(run):
    record = run(bad("step", prime="value_error"))
    assert record.status == "error"
    assert record.evidence["exception"] == "ValueError"
    assert record.evidence["phase"] == "prime"


def test_memory_that_runs_out_without_a_budget_is_the_hosts(run):
    record = run(bad("loss", "memory_error"))
    assert record.status == "oom_host"
    assert record.evidence["exception"] == "MemoryError"
    assert record.evidence["phase"] == "first_step/loss"
    assert "limit_bytes" not in record.evidence


def test_memory_that_runs_out_far_below_the_budget_is_not_the_budgets_doing(run):
    record = run(bad("loss", "memory_error"), budget=1 << 40)
    assert record.status == "oom_host"


@pytest.mark.long_in_jax
@pytest.mark.parametrize("place", ["torch/cpu", "jax/cpu"])
def test_a_step_beyond_the_budget_says_so_with_limit_and_phase(run, place):
    budget = LOGITS_MIB * MIB // 2
    record = run(place=place, shape=LARGE, budget=budget)
    assert record.status == "oom_budget", record.evidence
    assert int(record.evidence["limit_bytes"]) > budget  # of all the process holds, not above the base
    assert record.evidence["phase"].startswith("first_step")
    assert record.memory.budget_bytes == budget
    assert 0 < record.memory.peak_host_bytes <= budget + untouched(budget) + record.memory.resolution_bytes
    assert record.memory.losses == ()


def test_the_same_step_within_its_budget_is_measured(run):
    budget = 8 * LOGITS_MIB * MIB
    record = run(shape=LARGE, budget=budget)
    assert record.status == "ok", record.evidence
    assert record.memory.within_budget is True
    assert LOGITS_MIB * MIB < record.memory.peak_host_bytes < budget
    assert len(record.memory.losses) == 3
    tight = run(shape=LARGE, budget=record.memory.peak_host_bytes + MIB)
    assert tight.status == "ok", "its peak decides, and not what it maps and never touches"


def test_a_run_that_ends_above_its_budget_has_run_out_of_it(run):
    peak = run(shape=LARGE, budget=8 * LOGITS_MIB * MIB).memory.peak_host_bytes
    record = run(shape=LARGE, budget=peak - 8 * MIB)
    assert (record.status, len(record.memory.losses)) == ("oom_budget", 3)
    assert re.fullmatch(r"took [78]\.\d MiB more than its budget", record.evidence["message"])
    assert record.evidence["phase"] == record.memory.peak_phase


def test_memory_that_grows_with_each_step_is_told_as_a_slope(run):
    record = run(bad("step", "leak"), steps=10)
    assert record.status == "ok", record.evidence
    assert record.memory.slope_bytes_per_step == pytest.approx(4 * MIB, rel=0.1)
    assert abs(run(bad("step"), steps=10).memory.slope_bytes_per_step) < MIB / 2


def test_a_strategy_that_another_one_replaced_is_an_error_not_a_row_without_effect(run):
    record = run(bad("loss"), Applied(name="other_loss"))
    assert record.status == "error"
    assert "'bad_loss' rewrote 'loss'" in record.evidence["message"]
    assert "never called" in record.evidence["message"]


# What the parent sees


@pytest.mark.alone  # to the second, which neighbours would take
@pytest.mark.parametrize(  # a fresh one has to load torch by then
    ("fresh", "deadline"), [(False, 4.0), pytest.param(True, 9.0, marks=pytest.mark.long)]
)
def test_a_hanging_worker_is_ended_at_the_deadline(run, fresh, deadline):
    phases = []
    record = run(bad("step", "hang"), deadline=deadline, watch=phases.append, fresh=fresh)
    assert record.status == "timeout"
    assert run.seconds < deadline + 2.0  # it heeds SIGTERM
    assert record.evidence["signal"] == "SIGTERM"
    assert record.evidence["phase"] == "first_step" == phases[-1]
    assert deadline <= record.evidence["seconds"] < deadline + 2.0
    assert record.flags == ("lower_bound",)


@pytest.mark.alone  # to the second, which neighbours would take
def test_a_worker_that_ignores_sigterm_is_killed_within_six_seconds_of_the_deadline(run):
    record = run(bad_worker("hang_ignoring_sigterm"), deadline=1.0)
    assert record.status == "timeout"
    assert 1.0 + 4.0 < run.seconds < 1.0 + 6.0
    assert record.evidence["signal"] == "SIGKILL"
    assert record.evidence["seconds"] >= 1.0


def test_a_worker_that_dies_while_priming_names_that_phase(run):
    record = run(bad("step", prime="kill_itself"))
    assert record.status == "killed_unknown"
    assert record.evidence["phase"] == "prime"


def test_a_kill_without_proof_is_never_called_out_of_memory(run):
    record = run(bad("step", "kill_itself"))
    assert record.status == "killed_unknown"
    assert record.evidence["signal"] == "SIGKILL"
    assert record.evidence["phase"] == "first_step"


@pytest.mark.parametrize(("fault", "name"), [("abort", "SIGABRT"), ("segfault", "SIGSEGV"), ("real_time", "signal 40")])
def test_a_crash_names_its_signal_and_phase(run, fault, name):
    record = run(bad("init", fault))
    assert record.status == "crash"
    assert record.evidence["signal"] == name
    assert record.evidence["phase"] == "init"


def test_an_abort_with_bad_alloc_is_memory_that_ran_out(run):
    record = run(bad_worker("bad_alloc"))
    assert record.status == "oom_host"
    assert "bad_alloc" in record.evidence["stderr_tail"]


def test_exit_code_137_is_an_exit_code_not_a_kill(run):
    record = run(bad_worker("exit_137"))
    assert record.status == "error"
    assert record.evidence["exit_code"] == 137
    assert record.evidence["message"] == "said at last"


def test_a_worker_that_floods_its_output_is_ended(run):
    record = run(bad_worker("flood"))
    assert record.status == "invalid_output"
    assert "64 MiB" in record.evidence["message"]
    assert run.seconds < 30


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no_result", "no result"),
        ("broken", "not a record"),
        ("oversized", "larger than"),
        ("nan", ""),
        ("nan_unseen", ""),
        ("infinite_evidence", ""),
        ("wrong_schema", "status"),
        ("two_results", "more results"),
        ("fifo", ""),
        ("odd_phase", "no result"),
    ],
)
@pytest.mark.timeout(120)
def test_a_result_that_cannot_be_believed_is_invalid_output(run, fault, told):
    record = run(bad_worker(fault))
    assert record.status == "invalid_output"
    assert told in record.evidence["message"]
    json.dumps(record.model_dump(mode="json"), allow_nan=False)  # it can be kept


def test_a_good_result_is_not_believed_when_the_worker_then_crashed(run):
    record = run(bad_worker("ok_then_abort"))
    assert record.status == "crash"
    assert record.evidence["signal"] == "SIGABRT"


# What a dead worker had used


def test_a_spike_in_a_finished_phase_outlives_the_worker(run):
    record = run(bad("source", "short_spike"), bad("init", "kill_itself"))
    assert record.status == "killed_unknown"
    assert "lower_bound" in record.flags
    assert 199 * MIB <= record.memory.peak_host_bytes < 220 * MIB


@pytest.mark.alone  # the process of the tests must look as often as it means to
def test_a_spike_in_the_running_phase_is_seen_from_outside(run):
    record = run(bad("source", "long_spike_then_kill"))
    assert record.status == "killed_unknown"
    assert "lower_bound" in record.flags
    assert 199 * MIB <= record.memory.peak_host_bytes < 220 * MIB
    assert record.memory.peak_phase == "source"


@pytest.mark.parametrize(
    ("kills", "of_memory", "status", "proof"),
    [
        ([3, 4], 1e9, "oom_host", "the kernel counted an out-of-memory kill in this control group"),
        ([3, 3], 0.0, "oom_host", "weak: its last known peak was at least 0.9 of the machine's memory"),
        ([3, 3], 1e9, "killed_unknown", None),
    ],
)
def test_a_kill_that_the_kernel_counted_or_at_the_end_of_memory_is_one_for_want_of_it(
    run, monkeypatch, kills, of_memory, status, proof
):
    counted = iter(kills)
    monkeypatch.setattr(runner.memory, "kernel_kills", lambda: next(counted))
    monkeypatch.setattr(runner, "NEAR_MEMORY", 0.9 * of_memory)
    record = run(bad("source", "kill_itself"))
    assert (record.status, record.evidence.get("proof")) == (status, proof)


def test_what_priming_used_is_no_part_of_a_dead_workers_peak(run):
    record = run(bad("source", "kill_itself", prime="long_spike"))
    assert record.status == "killed_unknown"
    assert record.memory.peak_host_bytes is None or record.memory.peak_host_bytes < 100 * MIB


@pytest.mark.alone  # the process of the tests must look as often as it means to
@pytest.mark.parametrize(("way", "least", "most"), [("children_in_turn", 60, 120), ("children_at_once", 240, 400)])
def test_children_count_together_only_where_they_were(run, way, least, most):
    """Compilers that followed each other would count as ten GiB, each of which took a quarter of one."""
    record = run(bad("source", way))
    assert record.status == "ok"
    assert least * MIB <= record.child_peak_bound_bytes <= most * MIB
    assert record.child_peak_bytes <= record.child_peak_bound_bytes


@pytest.mark.alone  # the process of the tests must look as often as it means to
def test_a_child_does_not_count_as_what_its_parent_is_before_it_executes_a_program(run):
    record = run(bad("source", "children_before_their_program"))
    assert record.status == "ok"
    assert 0 < record.child_peak_bound_bytes < 50 * MIB


# What stays behind: nothing


@pytest.mark.alone  # to the second, which neighbours would take
def test_a_grandchild_in_a_session_of_its_own_is_swept(run, plugin):
    record = run(bad("source", "leave_a_grandchild"))
    assert record.status == "ok"
    assert "child_processes" in record.flags
    assert comes_true(lambda: gone(int((plugin.parent / "grandchild").read_text())), 1)


@pytest.mark.alone  # to the second, which neighbours would take
def test_a_grandchild_that_dropped_the_runs_id_is_swept_too(run, plugin):
    try:
        assert run(bad_worker("leave_a_nameless_grandchild")).status == "invalid_output"
        assert comes_true(lambda: gone(int((plugin.parent / "nameless").read_text())), 1)
    finally:
        end(psutil.Process().children())


RUNNER = """
import sys
from harness.run import runner, template
from harness.records import Task
with template.forking() if sys.argv[2] == "forked" else template.suspended():
    runner.run(Task.model_validate_json(sys.argv[1]), 1, 60.0)
"""


@pytest.mark.alone  # to the second, which neighbours would take
@pytest.mark.parametrize("start", ["forked", "fresh"])
@pytest.mark.parametrize("moment", ["while it starts", "while it runs"])
def test_a_worker_dies_with_its_parent(plugin, tmp_path, moment, start):
    task = make(plugin, bad("source", "hang")).model_copy(update={"run_id": f"{RUN}-{start}"})
    marker = plugin.parent / "hanging"
    marker.unlink(missing_ok=True)
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed runner cannot clear its folder
    parent = subprocess.Popen([sys.executable, "-c", RUNNER, task.model_dump_json(), start], env=env)
    try:
        begun = marker.exists if moment == "while it runs" else lambda: alive(task.run_id)
        assert comes_true(begun, 30)
    finally:
        parent.kill()
        parent.wait()
    allowed = 1 if moment == "while it runs" else 10  # a worker that has not yet armed itself ends when it does
    try:
        assert comes_true(lambda: not alive(task.run_id), allowed)
    finally:
        end(psutil.Process().children())


# What a worker is given


@pytest.mark.parametrize(
    ("kind", "regime"),
    [
        ("memory", "glibc-pinned"),
        pytest.param("time", "native", marks=pytest.mark.alone),  # steps of 1 ms, beside which another process counts
    ],
)
def test_the_environment_is_an_allow_list_and_pinned_for_memory_alone(run, plugin, monkeypatch, kind, regime):
    strays = {
        "LD_PRELOAD": "/nowhere/stray.so",
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=3",
        "MALLOC_PERTURB_": "7",
        "MALLOC_ARENA_MAX": "5",
        "MALLOC_TOP_PAD_": "99",
        "XLA_FLAGS": "--stray",
        "OMP_NUM_THREADS": "7",
    }
    for name, value in strays.items():
        monkeypatch.setenv(name, value)
    record = run(bad("source", "note_environment"), kind=kind)
    assert record.status == "ok", record.evidence
    assert (record.memory if kind == "memory" else record.times).regime == regime
    seen = json.loads((plugin.parent / f"environ-{RUN}.json").read_text())
    assert not {"LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_PERTURB_", "XLA_FLAGS"} & set(seen)
    malloc = {name: value for name, value in seen.items() if name.startswith(("MALLOC_", "NUMPY_"))}
    assert malloc == (environment.PINS if kind == "memory" else {})
    assert seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == seen["OPENBLAS_NUM_THREADS"] == "1"


def test_a_good_task_works_after_all_of_these(run):
    before = {child.pid for child in psutil.Process().children()}
    record = run(bad("step"), bad("loss"))
    assert record.status == "ok", record.evidence
    assert record.flags == ()
    assert len(record.memory.losses) == 3
    assert {child.pid for child in psutil.Process().children()} <= before | template.processes()


def test_a_worker_that_is_ended_has_its_grace_while_other_threads_end_theirs():
    slow = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7))); "
    slow += "print(flush=True); time.sleep(60)"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    process = subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    one = runner.Worker(None, None, None, 60.0, lambda phase: None, before, process)
    runner._running.add(process.pid)
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(one.end)
        time.sleep(0.3)
        assert process.pid not in {child.pid for child in runner._left_over(before)}
        ended.result(timeout=20)
    process.stdout.close()
    assert process.returncode == 7 and process.pid not in runner._running
