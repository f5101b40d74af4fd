"""What is shown of a run: how long it will take, never more than its rounds may, and less from line to line."""

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness import Place
from harness.cli import progress, run
from harness.contract import plugins
from harness.records import Applied, Case, Origin, Prediction, Record, Slot
from harness.records.roofline import Operations
from harness.records.store import StoreError
from harness.run import session

CASE = Case(workload="decoder", shape={}, place=Place("torch", "cpu"), corpus="", tokenizer="")


def rounds(*cases: str) -> list[Slot]:
    return [Slot(case=case, kind="time", round=at) for at in range(24) for case in cases]


def seconds_left(line: str) -> float:
    number, unit = re.findall(r"about (\d+) (min|s) left", line)[0]
    return float(number) * {"min": 60, "s": 1}[unit]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only second that the clock shows, which a test moves on."""
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    return seconds


def test_rounds_take_no_longer_than_they_may_and_the_time_left_falls(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab"), frozenset("c")], [100.0, 100.0])
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


def test_a_round_that_has_begun_is_timed_to_its_end(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("abcd")], [10.0])
        watcher.begin(rounds("a", "b", "c", "d"), 0)
        for slot in rounds("a", "b", "c", "d")[:5]:  # the first takes all the time there is, and three more follow
            now[0] += 20.0
            watcher.finish(Record(slot=slot, origin=Origin(worker_seconds=20.0)), CASE)
    left = [seconds_left(line) for line in lines.getvalue().splitlines()]
    assert left == [60, 40, 20, 1, 60], "no next round follows the first; where one does, it is timed as well"


def test_what_was_spent_before_a_run_was_resumed_counts(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("a"), frozenset("b"), frozenset("c")], [200.0, 40.0, -5.0])
        watcher.begin(rounds("a", "b", "c"), 3)
        now[0] += 10.0
        watcher.finish(Record(slot=rounds("a")[0], origin=Origin(worker_seconds=10.0)), CASE)
    assert seconds_left(lines.getvalue().splitlines()[-1]) == 240, "190 s and 40 s, in whole minutes"


def test_who_ended_badly_takes_of_the_time_for_rounds_as_well(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab")], [100.0])
        watcher.begin(rounds("a", "b"), 0)
        now[0] += 40.0
        watcher.finish(Record(slot=rounds("a")[0], status="timeout", evidence={"seconds": 40.0}), CASE)
    assert seconds_left(lines.getvalue()) == 60


def test_a_line_of_a_long_run_takes_no_time(slowness: float) -> None:
    groups = [[f"{group}-{case}" for case in range(4)] for group in range(250)]
    slots = [slot for group in groups for slot in rounds(*group)]
    memory = [Slot(case=case, kind="memory") for group in groups for case in group]
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset(group) for group in groups], [100.0] * len(groups))
        watcher.begin([*slots, *memory], 0)
        for slot in memory:
            watcher.pace.predicted(slot.case, (Operations("float32", 1e12, 0),), "cpu")
        begun = time.process_time()
        for slot in [*slots[:50], *memory[:50]]:
            watcher.finish(Record(slot=slot, origin=Origin(worker_seconds=1.0)), CASE)
        assert time.process_time() - begun < 5 * slowness, "a hundred lines; they took 60 s"
    assert len(lines.getvalue().splitlines()) == 100


def test_without_groups_every_round_counts(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.begin(rounds("a"), 0)
        now[0] += 30.0
        watcher.finish(Record(slot=rounds("a")[0], origin=Origin(worker_seconds=1.0)), CASE)
    assert "[1/24]" in lines.getvalue() and seconds_left(lines.getvalue()) == round(23 * 30 / 60) * 60


def test_what_a_row_takes_is_learned_by_its_work_and_what_was_cut_short_shows_nothing(
    now: list[float],
) -> None:
    lines = io.StringIO()
    memory = [Slot(case=case, kind="memory") for case in "abc"]
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.begin([*(Slot(case=case, kind="predict") for case in "abc"), *memory], 0)
        for case, times in (("a", 5), ("b", 1), ("c", 10)):
            work = (Operations("float32", times * 1e12, 0),)
            slot = Slot(case=case, kind="predict")
            watcher.finish(Record(slot=slot, prediction=Prediction(predicted_work=work)), CASE)
        now[0] += 5.0
        watcher.finish(Record(slot=memory[0], status="oom_budget"), CASE)
        now[0] += 43.0
        watcher.finish(Record(slot=memory[1]), CASE)
    first, second = lines.getvalue().splitlines()
    assert seconds_left(first) == 11 * 60, "by the usual machine: 6 steps of 10 and of 100 s, in whole minutes"
    assert seconds_left(second) == 7 * 60, "40 s of steps showed what ten times the work will take"


def test_rows_that_are_not_predicted_yet_take_as_long_as_those_that_ran(now: list[float]) -> None:
    lines = io.StringIO()
    memory = [Slot(case=case, kind="memory") for case in "abcd"]
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.begin(memory, 0)
        for case in "ab":
            watcher.pace.predicted(case, (Operations("float32", 1e12, 0),), "cpu")
            now[0] += 150.0
            watcher.finish(Record(slot=Slot(case=case, kind="memory")), CASE)
    assert seconds_left(lines.getvalue().splitlines()[-1]) == 300, "two of 150 s, and not of the usual three"


def test_rows_that_cannot_run_here_take_no_time(now: list[float]) -> None:
    lines = io.StringIO()
    memory = [Slot(case=case, kind="memory") for case in "abcd"]
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.unsupported(frozenset("cd"))
        watcher.begin(memory, 0)
        for case, flops in (("a", 1e12), ("b", 1e12), ("c", 1e16), ("d", 1e16)):
            work = (Operations("float32", flops, 0),)
            slot = Slot(case=case, kind="predict")
            watcher.finish(Record(slot=slot, prediction=Prediction(predicted_work=work)), CASE)
        now[0] += 63.0
        watcher.finish(Record(slot=memory[0]), CASE)
        watcher.finish(Record(slot=memory[2], status="unsupported"), CASE)
    first, second = lines.getvalue().splitlines()
    assert seconds_left(first) == seconds_left(second) == 63, "the second row alone"


class Stream(io.StringIO):
    """What was sent to a terminal, or to a file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def console(self) -> Console:
        """Return a console like those of the command line, with FORCE_COLOR set."""
        return Console(
            file=self, width=200, height=50, force_terminal=True, color_system=None, markup=False, soft_wrap=True
        )


def test_a_bar_shows_the_phase_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Stream(True)
    with progress.Watcher(screen.console(), plugins.load()) as watcher:
        watcher.start("memory", CASE)
        watcher.phase("step")
    assert "memory torch/cpu baseline [step]" in screen.getvalue()


@pytest.mark.parametrize("redirected", ["nothing", "out", "err"])
def test_a_table_begins_on_a_line_of_its_own_on_a_terminal_and_goes_where_answers_go(
    redirected: str,
    here: Callable[..., tuple[object, str, str]],
    smallest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(plan: object, loaded: object, options: object, watcher: progress.Watcher) -> Path:
        watcher.out("| a table |")
        raise StoreError("no more room")

    monkeypatch.setenv("TERM", "xterm")
    screen, file = Stream(True), Stream(False)
    for stream in ("out", "err"):
        monkeypatch.setattr(run, stream, (file if redirected == stream else screen).console())
    monkeypatch.setattr(session, "run", measured)
    (tmp_path / "small.yaml").write_text(smallest)
    code, _, errors = here(tmp_path, "run", "small.yaml")
    assert code == 2, errors
    if redirected == "out":
        assert file.getvalue() == "# As small as it gets\n\n| a table |\n"
    elif redirected == "err":
        assert screen.getvalue() == "# As small as it gets\n\n| a table |\n"
        assert file.getvalue() == "", "no bar goes to a file, though FORCE_COLOR may ask for colours there"
    else:
        before, title, after = screen.getvalue().partition("# As small as it gets\n")
        assert title and before.endswith("\x1b[2K"), "the line of the bar was cleared"
        assert "| a table |\n" in after


@pytest.mark.parametrize("on_terminal", [True, False])
def test_nothing_of_a_suite_or_a_worker_is_obeyed_by_the_terminal(on_terminal: bool) -> None:
    case = CASE.model_copy(update={"strategies": (Applied(name="qlora", knobs={"targets": "a\x1b[31m\nb"}),)})
    lines = Stream(on_terminal)
    with progress.Watcher(lines.console(), plugins.load()) as watcher:
        watcher.begin([Slot(case="a", kind="memory")], 0)
        watcher.warn(f"1 case is skipped: {case.label}")
        watcher.start("memory", case)
        watcher.phase("step\x1b[31m")
        watcher.finish(Record(slot=Slot(case="a", kind="memory")), case)
    assert "targets=a" in lines.getvalue() and "\x1b[31m" not in lines.getvalue()
