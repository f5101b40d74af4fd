"""Processes that take turns: one runs at a time, with all that it started, and each is judged by its own seconds."""

import json
import os
import signal
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from harness.records import Applied, Case, Record, Task
from harness.run import runner, template, turns
from harness.worker import timing

SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "batch": 1, "tokens": 33}
STEPS, WARMUP = 6, 1
NOTING = f'''
import json, os, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path
from harness import Strategy, hookimpl

NOTES = Path(__file__).with_suffix(".notes")

CHILD = """
import json, os, sys, time
while True:
    time.sleep(0.002)
    now = time.monotonic()
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps([os.getpid(), "child", now, now]) + chr(10))
"""

def note(what, begun):
    with open(NOTES, "a") as file:
        file.write(json.dumps([os.getpid(), what, begun, time.monotonic()]) + "\\n")

def noted(parts, slowly=0.05, fails_at=None):
    inner, calls = parts.step, []

    def step(parts, state, x, y):
        calls.append(1)
        begun = time.monotonic()
        if len(calls) == fails_at:
            raise RuntimeError("it fails in its turn")
        while time.monotonic() < begun + slowly:
            sum(range(10_000))
        done = inner(parts, state, x, y)
        if len(calls) > {1 + WARMUP}:
            note("step", begun)
        return done

    return replace(parts, step=step)

def ticking(parts):
    def tick():
        while True:
            time.sleep(0.002)
            note("thread", time.monotonic())

    threading.Thread(target=tick, daemon=True).start()
    subprocess.Popen([sys.executable, "-S", "-c", CHILD, str(NOTES)])
    return noted(parts)

@hookimpl
def harness_strategies():
    return [
        Strategy("noting", rewrites=("step",), on={{"torch": lambda parts: noted(parts)}}, about="Note steps."),
        Strategy("failing", rewrites=("step",), on={{"torch": lambda parts: noted(parts, 0, 5)}}, about="Fail."),
        Strategy("ticking", rewrites=("step",), on={{"torch": ticking}}, about="Work beside the loop."),
        Strategy("slow", rewrites=("step",), on={{"torch": lambda parts: noted(parts, 0.4)}}, about="Take long."),
    ]
'''


@pytest.fixture(scope="module")
def noting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all tests, so that one template has loaded it for all."""
    path = tmp_path_factory.mktemp("noting") / "noting.py"
    path.write_text(NOTING, encoding="utf-8")
    return path


@pytest.fixture
def plugin(noting: Path) -> Path:
    """The plugin, of which nothing is noted yet."""
    noting.with_suffix(".notes").unlink(missing_ok=True)
    return noting


def task(plugin: Path, name: str, **settings: Any) -> Task:
    case = Case.model_validate(
        {
            "workload": "decoder",
            "shape": SHAPE,
            "place": "torch/cpu",
            "corpus": "drawn",
            "tokenizer": "none",
            "strategies": (Applied(name=name),),
        }
    )
    common = {"run_id": "turns", "parent": os.getpid(), "folder": "", "plugins": (str(plugin),)}
    return Task(kind="time", cases=(case,), **{**common, "steps": STEPS, "warmup": WARMUP, "turns": 3, **settings})


def run(*tasks: Task, deadline: float = 60.0) -> list[Record]:
    return turns.run(tasks, 1, deadline, lambda phase: None, Random(1))


def notes(plugin: Path, what: str) -> list[tuple[int, float, float]]:
    """Return who did something, from when to when, in the order of time."""
    lines = map(json.loads, plugin.with_suffix(".notes").read_text().splitlines())
    return sorted(((pid, begun, ended) for pid, each, begun, ended in lines if each == what), key=lambda each: each[1])


def one_at_a_time(steps: list[tuple[int, float, float]]) -> bool:
    return all(ended <= begun for (_, _, ended), (_, begun, _) in pairwise(steps))


def stretches(steps: list[tuple[int, float, float]]) -> Counter[int]:
    """Count for each process how often it began to run after another one."""
    return Counter(pid for at, (pid, *_) in enumerate(steps) if not at or steps[at - 1][0] != pid)


@pytest.mark.alone  # steps are timed
def test_one_process_runs_at_a_time_and_each_has_its_turns(plugin: Path) -> None:
    records = run(*[task(plugin, "noting") for _ in range(3)])
    assert [record.status for record in records] == ["ok"] * 3, [record.evidence for record in records]
    steps = notes(plugin, "step")
    assert len(steps) == 3 * STEPS
    assert one_at_a_time(steps)
    assert sorted(stretches(steps).values()) >= [2, 2, 2], "a process has its turns apart"
    for record in records:
        times = record.times
        assert (times.turns, len(times.step_seconds)) == (3, STEPS)
        assert max(times.step_seconds) < 0.25, "what others did is in no step"
        assert times.rest_seconds > 4 * 0.05
        assert sum(times.step_seconds) < (record.origin.worker_seconds or 0)


@pytest.mark.alone  # by the clock
def test_what_a_process_started_rests_with_it(plugin: Path) -> None:
    for record in run(task(plugin, "ticking"), task(plugin, "noting")):
        assert record.status == "ok", record.evidence
    steps = notes(plugin, "step")
    (own,) = {pid for pid, *_ in notes(plugin, "thread")}
    others = [(begun, ended) for pid, begun, ended in steps if pid != own]
    assert len(others) == STEPS
    for kind in ("thread", "child"):
        ticks = [begun for _, begun, _ in notes(plugin, kind)]
        assert any(begun <= tick <= ended for pid, begun, ended in steps if pid == own for tick in ticks), kind
        assert not any(begun <= tick <= ended for begun, ended in others for tick in ticks), kind


def test_who_has_fewer_turns_has_them_spread_over_those_of_the_others(plugin: Path) -> None:
    run(task(plugin, "noting", steps=2), task(plugin, "noting", steps=6, turns=6))
    order = [pid for pid, *_ in notes(plugin, "step")]
    few = min(set(order), key=order.count)
    first, second = (at for at, pid in enumerate(order) if pid == few)
    assert second - first >= 3


def test_one_that_fails_in_its_turn_says_so_and_stops_nobody(plugin: Path) -> None:
    failed, whole = run(task(plugin, "failing"), task(plugin, "noting"))
    assert failed.status == "error" and "it fails in its turn" in failed.evidence["message"]
    assert whole.status == "ok" and len(whole.times.step_seconds) == STEPS


@pytest.mark.long
@pytest.mark.alone  # beside others, starting alone may take as long as one may run
def test_a_deadline_counts_the_seconds_in_which_a_process_runs(plugin: Path) -> None:
    begun = time.monotonic()
    rows = [task(plugin, "slow", steps=10) for _ in range(3)]  # of 4.8 s each, beside what starting takes
    with template.forking():
        records = run(*rows, deadline=12.0)
    assert [record.status for record in records] == ["ok"] * 3, [record.evidence for record in records]
    assert time.monotonic() - begun > 12.0, "all three were there for longer than one may run"
    with template.forking():
        late, early = run(task(plugin, "slow", steps=60), task(plugin, "noting"), deadline=12.0)
    assert (late.status, early.status) == ("timeout", "ok")
    assert 12.0 <= late.evidence["seconds"] < 15.0, "as long as it ran, and not as others did"
    assert one_at_a_time(notes(plugin, "step")), "what has to be ended ends before others go on"


def test_an_interrupt_leaves_none_that_waits(plugin: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def interrupted(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    rows = [task(plugin, "ticking") for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        turns.run(rows, 1, 60.0, lambda phase: None, Random(1), interrupted)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before | template.processes()


def test_one_that_is_killed_while_it_waits_stops_nobody(plugin: Path) -> None:
    def kill(number: int) -> None:
        if number == 1:
            (waiting,) = runner._running
            os.kill(waiting, signal.SIGKILL)

    killed, whole = turns.run([task(plugin, "noting")] * 2, 1, 60.0, lambda phase: None, Random(1), kill)
    assert (killed.status, whole.status) == ("killed_unknown", "ok")


def test_turns_are_of_as_many_steps_and_lie_about_the_middle_of_their_cycles() -> None:
    assert timing._shares(7, 3) == [2, 2, 3]
    assert sum(turns._is_due(3, cycle, 16) for cycle in range(16)) == 3
    assert [cycle for cycle in range(16) if turns._is_due(2, cycle, 16)] == [3, 11], "about the middle of each half"


def test_alone_a_process_never_stops(plugin: Path) -> None:
    (record,) = run(task(plugin, "noting", turns=1))
    assert (record.status, record.times.turns, record.times.rest_seconds) == ("ok", 1, 0.0)
