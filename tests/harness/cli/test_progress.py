"""How long a run will take, as it says itself: never more than its rounds may, and less from line to line."""

import io
import re

import pytest
from rich.console import Console

from harness import Place
from harness.cli import progress
from harness.contract import plugins
from harness.records import Case, Origin, Record, Slot

CASE = Case(workload="decoder", shape={}, place=Place("torch", "cpu"), corpus="", tokenizer="")


def rounds(*cases: str) -> list[Slot]:
    return [Slot(case=case, kind="time", round=at) for at in range(24) for case in cases]


def seconds_left(line: str) -> float:
    number, unit = re.findall(r"about (\d+) (min|s) left", line)[0]
    return float(number) * {"min": 60, "s": 1}[unit]


def test_rounds_take_no_longer_than_they_may_and_the_time_left_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab"), frozenset("c")], 100.0)
        watcher.begin(rounds("a", "b", "c"), 0)
        for slot in rounds("a", "b")[:10]:  # ten seconds each: what the first group may take
            now[0] += 10.0
            watcher.finish(Record(slot=slot, origin=Origin(worker_seconds=10.0)), CASE)
        watcher.left(rounds("c"))
        now[0] += 10.0
        watcher.finish(Record(slot=rounds("c")[0], origin=Origin(worker_seconds=10.0)), CASE)
    left = [seconds_left(line) for line in lines.getvalue().splitlines()]
    assert len(left) == 11 and left == sorted(left, reverse=True)
    assert left[0] == 180, "90 s of its own group, 100 s of the next, in whole minutes"
    assert left[-1] == 90


def test_without_groups_every_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.begin(rounds("a"), 0)
        now[0] += 30.0
        watcher.finish(Record(slot=rounds("a")[0], origin=Origin(worker_seconds=1.0)), CASE)
    assert "[1/24]" in lines.getvalue() and seconds_left(lines.getvalue()) == round(23 * 30 / 60) * 60
