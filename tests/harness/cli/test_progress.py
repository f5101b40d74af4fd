"""What is shown of a run: how long it will take, as this run and earlier results have shown."""

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from harness import Place
from harness.cli import progress, run
from harness.cli.screen import show
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


def ended(slot: Slot, seconds: float) -> Record:
    return Record(slot=slot, origin=Origin(worker_seconds=seconds))


def memory(*cases: str, repeat: int = 0) -> list[Slot]:
    return [Slot(case=case, kind="memory", repeat=repeat) for case in cases]


def test_no_round_begins_after_the_time_for_rounds_is_spent(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab"), frozenset("c")], [50.0, 15.0])
        watcher.begin(rounds("a", "b", "c"), 0)
        for slot in rounds("a", "b")[:6]:  # ten seconds each: three of the rounds that may begin in 50
            now[0] += 10.0
            watcher.finish(ended(slot, 10.0), CASE)
        watcher.left(rounds("c"))
        now[0] += 10.0
        watcher.finish(ended(rounds("c")[0], 10.0), CASE)
    left = [seconds_left(line) for line in lines.getvalue().splitlines()]
    assert left == [70, 60, 50, 40, 30, 20, 10], "three rounds of two rows, and two of one row, that begin in 15 s"


def test_processes_that_end_at_once_change_the_time_left_only_by_what_they_took(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("abcd")], [600.0])
        watcher.begin([slot for slot in rounds("a", "b", "c", "d") if slot.round < 4], 0)
        for number in range(4):
            now[0] += 20.0
            for slot in rounds("a", "b", "c", "d")[4 * number : 4 * number + 4]:
                watcher.finish(ended(slot, 5.0), CASE)
    left = [seconds_left(line) for line in lines.getvalue().splitlines()[:-1]]
    assert left == [5.0 * many for many in range(15, 0, -1)]


def test_rows_leave_as_they_are_decided(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("abcdefgh")], [6000.0])
        watcher.begin(rounds(*"abcdefgh"), 0)
        for slot in rounds(*"abcdefgh")[:32]:
            now[0] += 1.0
            watcher.finish(ended(slot, 1.0), CASE)
        watcher.timed("abcdefgh", 4, "ab")
        for slot in rounds("a", "b")[8:10]:
            now[0] += 1.0
            watcher.finish(ended(slot, 1.0), CASE)
    at_first, *_, before, _, here = lines.getvalue().splitlines()
    assert 3 * 8 < seconds_left(at_first) < 9 * 8, "of 24 rounds of eight rows"
    assert "[32 of about 192]" in before and "[34 of about 72]" in here, "two of eight rows go on"
    assert 2 < seconds_left(here) < 12, "of 19 rounds of two rows"


def test_rounds_take_as_many_rows_as_in_earlier_results(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab")], [600.0])
        watcher.earlier(dict.fromkeys(rounds("a", "b")[:12], 4.0))
        watcher.begin(rounds("a", "b"), 0)
        now[0] += 5.0
        watcher.finish(ended(rounds("a")[0], 5.0), CASE)
    assert seconds_left(lines.getvalue()) == 55, "twelve of them, one of which has shown that they take 5 s today"


def test_what_a_task_took_in_earlier_results_is_what_it_takes_as_far_as_this_machine_is_as_fast(
    now: list[float],
) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("abc")], [600.0])
        earlier = zip([*memory("a", "b", "c"), *memory("b", repeat=1)], [10.0, 20.0, 5.0, 20.0], strict=True)
        watcher.earlier(dict(earlier))
        watcher.begin(memory("a", "b", "c"), 0)
        now[0] += 20.0
        watcher.finish(Record(slot=memory("a")[0]), CASE)
        now[0] += 40.0
        watcher.finish(Record(slot=memory("b")[0]), CASE)
        watcher.repeated("abc", memory("b", repeat=1))
        now[0] += 10.0
        watcher.finish(Record(slot=memory("c")[0]), CASE)
    left = [seconds_left(line) for line in lines.getvalue().splitlines()]
    assert left == [70, 30, 40], "twice of 20 and 5 s, and the row that was measured again, until it is to be again"
    assert "[3 of about 4]" in lines.getvalue()


def test_rows_near_a_bound_are_expected_as_often_as_in_comparisons_before(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab"), frozenset("cd")], [600.0, 600.0])
        watcher.begin(memory("a", "b", "c", "d"), 0)
        for case in "ab":
            now[0] += 10.0
            watcher.finish(Record(slot=memory(case)[0]), CASE)
        watcher.repeated("ab", [*memory("a", repeat=1), *memory("a", repeat=2)])
        for repeat in (1, 2):
            now[0] += 10.0
            watcher.finish(Record(slot=memory("a", repeat=repeat)[0]), CASE)
    left = [seconds_left(line) for line in lines.getvalue().splitlines()]
    assert left == [30, 20, 50, 40], "two more for each two rows"


def test_a_comparison_that_is_not_timed_yet_takes_as_long_as_others_of_its_place_by_their_memory(
    now: list[float],
) -> None:
    lines = io.StringIO()
    elsewhere = CASE.model_copy(update={"place": Place("jax", "cpu")})
    few = [slot for slot in rounds("a", "b", "c") if slot.round < 4]
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("a"), frozenset("b"), frozenset("c")], [600.0] * 3)
        watcher.begin([*few, *memory("a", "b", "c")], 0)
        for case, at, seconds in (("b", CASE, 4.0), ("c", elsewhere, 4.0), ("a", CASE, 2.0)):
            now[0] += seconds
            watcher.finish(Record(slot=memory(case)[0]), at)
        for slot in [slot for slot in few if slot.case == "a"]:
            now[0] += 6.0
            watcher.finish(ended(slot, 6.0), CASE)
    assert seconds_left(lines.getvalue().splitlines()[-1]) == 4 * 12 + 4 * 6, "12 s where memory takes 4, 6 s elsewhere"


def test_a_row_that_is_timed_in_several_blocks_of_a_round_counts_once(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab")], [600.0])
        watcher.begin([slot for slot in rounds("a", "b") if slot.round < 4], 0)
        for slot in (*rounds("a", "b")[:2], Slot(case="a", kind="time", block=1)):
            now[0] += 4.0
            watcher.finish(ended(slot, 4.0), CASE)
    assert "[2 of about 8]" in lines.getvalue().splitlines()[-1]
    assert seconds_left(lines.getvalue().splitlines()[-1]) == 36, "six rows of 4 s, and the one in a second block"


def test_what_several_machines_time_at_once_takes_less(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("a"), frozenset("b")], [600.0, 600.0])
        watcher.begin([slot for slot in rounds("a", "b") if slot.round < 4], 0)
        for slot in rounds("a", "b")[:4]:
            now[0] += 5.0
            watcher.finish(ended(slot, 10.0), CASE)
    assert [seconds_left(line) for line in lines.getvalue().splitlines()] == [35, 30, 25, 20]


def test_on_a_terminal_the_time_left_falls_while_a_task_runs(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Stream(True)
    with progress.Watcher(screen.console(), plugins.load()) as watcher:
        watcher.begin(memory("a", "b"), 0)
        now[0] += 40.0
        watcher.finish(Record(slot=memory("a")[0]), CASE)
        now[0] += 30.0
        watcher.phase("step")
        watcher.bar.refresh()
    assert "about 10 s left" in screen.getvalue()


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
        watcher.groups([frozenset("a"), frozenset("b"), frozenset("c")], [35.0, 15.0, -5.0])
        watcher.begin(rounds("a", "b", "c"), 3)
        now[0] += 10.0
        watcher.finish(Record(slot=rounds("a")[0], origin=Origin(worker_seconds=10.0)), CASE)
    assert seconds_left(lines.getvalue().splitlines()[-1]) == 50, "rounds that begin in 25 and in 15 s"


def test_who_ended_badly_takes_of_the_time_for_rounds_as_well(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset("ab")], [60.0])
        watcher.begin(rounds("a", "b"), 0)
        now[0] += 30.0
        watcher.finish(Record(slot=rounds("a")[0], status="timeout", evidence={"seconds": 30.0}), CASE)
    assert seconds_left(lines.getvalue()) == 90, (
        "the other row, and one more round that begins in the 30 s that are left"
    )


def test_a_line_of_a_long_run_takes_no_time(slowness: float) -> None:
    groups = [[f"{group}-{case}" for case in range(4)] for group in range(250)]
    slots = [slot for group in groups for slot in rounds(*group)]
    memory = [Slot(case=case, kind="memory") for group in groups for case in group]
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.groups([frozenset(group) for group in groups], [100.0] * len(groups))
        watcher.begin([*slots, *memory], 0)
        for slot in memory:
            watcher.pace.predicted(slot.case, (Operations("float32", 1e12, 0),), CASE.place)
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
    assert "[1 of about 24]" in lines.getvalue() and seconds_left(lines.getvalue()) == round(23 * 30 / 60) * 60


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
            watcher.pace.predicted(case, (Operations("float32", 1e12, 0),), CASE.place)
            now[0] += 150.0
            watcher.finish(Record(slot=Slot(case=case, kind="memory")), CASE)
    assert seconds_left(lines.getvalue().splitlines()[-1]) == 300, "two of 150 s, and not of the usual three"


def test_memory_of_jax_takes_longer_from_the_start_since_its_programs_are_compiled(now: list[float]) -> None:
    lines = io.StringIO()
    with progress.Watcher(Console(file=lines, width=200), plugins.load()) as watcher:
        watcher.places({"a": CASE.place, "b": Place("jax", "cpu")})
        watcher.begin(memory("a", "b"), 0)
        now[0] += 3.0
        watcher.finish(Record(slot=memory("a")[0]), CASE)
    assert seconds_left(lines.getvalue()) == 13, "twice the usual 6.5 s, as the first took twice its 1.5 s"


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


@pytest.mark.parametrize("by", ["a plan", "advice"])
def test_where_nobody_watches_predictions_say_now_and_then_how_many_there_are(now: list[float], by: str) -> None:
    """Three were stored and come at once; each other one takes ten seconds."""
    lines = io.StringIO()
    console = Console(file=lines, width=200)
    with progress.Watcher(console, plugins.load()) as watcher, progress.counted(console, "predicted", 10) as one_more:
        if by == "advice":
            watcher.predicting(10)
        for number in range(10):
            now[0] += 0.0 if number < 3 else 10.0
            if by == "advice":
                watcher.predicted(CASE)
            else:
                one_more()
    first = ["predicting 10 combinations"] if by == "advice" else []
    written = lines.getvalue().splitlines()
    assert written == [*first, "predicted 6 of 10, about 40 s left", "predicted 9 of 10, about 10 s left"]


def test_on_a_terminal_a_line_says_how_many_combinations_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Stream(True)
    with progress.Watcher(screen.console(), plugins.load()) as watcher:
        watcher.predicting(2)
        watcher.bar.refresh()
        watcher.predicted(CASE)
    assert "predicting 2 combinations" in screen.getvalue()
    assert "predicted 1 of 2: torch/cpu baseline" in screen.getvalue()


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "take a|b"), (False, r"take a\|b")])
def test_an_answer_has_its_escapes_where_a_document_reads_it_and_none_on_a_terminal(is_terminal, shown) -> None:
    stream = Stream(is_terminal)
    show(r"take a\|b", screen=stream.console())
    assert stream.getvalue() == shown
