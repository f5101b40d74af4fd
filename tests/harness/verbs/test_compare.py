"""Two runs compared: what is worse beyond the noise of both, and how a build fails on it."""

import json
import math
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from harness.contract import plugins
from harness.records import Applied, Case, Memory, Origin, Record, Slot, Times, store
from harness.records.record import Fit
from harness.report import compare as changed
from harness.verbs.compare import Condition, ConditionError, compare, differences, of_suites
from harness.verbs.pairing import completed
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import Speed

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[3]


def case(*names: str) -> Case:
    applied = tuple(Applied(name=name) for name in names)
    return Case(
        workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes", strategies=applied
    )


def row(
    *names: str,
    peak: int = 100 * MIB,
    rounds: tuple[float, ...] = (1.0, 1.0, 1.0),
    answer: str | None = "bit_exact",
    status: str = "ok",
    doubts: tuple[str, ...] = (),
    span: tuple[int, int] | None = None,
) -> Row:
    memory = Record(memory=Memory(resolution_bytes=4096))
    times = (Record(times=Times(step_seconds=(seconds,))) for seconds in rounds)
    found = (memory, *times)
    return Row(case(*names), status, peak, span_bytes=span, answer=answer, doubts=doubts, records=found)


def timed(ratio: float, error: float | None = 0.01, seconds: float = 1.0) -> Row:
    """Return a row that takes so many times what its run's baselines take, with that standard error."""
    interval = Interval(ratio * 0.97, ratio * 1.03)
    speed = Speed(ratio, interval, "open", 6, None, error, 15 if error is not None else 0)
    return replace(row("checkpoint", rounds=(seconds,) * 3), speed=speed)


def verdicts(old: Row, new: Row) -> dict[str, str]:
    found = compare([Comparison(old.case, (old,))], [Comparison(new.case, (new,))])
    return {change.figure: change.verdict for change in found}


def test_the_same_run_twice_is_the_same_in_everything():
    assert verdicts(row(), row()) == {"answer": "same", "peak": "same", "time": "same"}


@pytest.mark.parametrize(
    ("peak", "told"),
    [(103 * MIB, "worse"), (100 * MIB + 4096, "same"), (102 * MIB, "same"), (98 * MIB, "same"), (97 * MIB, "better")],
)
def test_a_peak_changes_beyond_two_percent(peak, told):
    assert verdicts(row(), row(peak=peak))["peak"] == told


@pytest.mark.parametrize("peak", [300, 100])
def test_a_peak_that_its_own_run_withholds_decides_nothing(peak):
    assert verdicts(row(), row(peak=peak * MIB, doubts=("unsettled",)))["peak"] == "unresolved"


@pytest.mark.parametrize(
    ("before", "after", "due"),
    [
        ((90, 100), (290, 300), "worse"),  # whatever its child processes share
        ((90, 100), (101, 300), "unresolved"),
        ((290, 300), (90, 100), "better"),
        ((99, 300), (90, 100), "unresolved"),
        ((100, 106), (100, 100), "unresolved"),  # repetitions differ as much
        ((90, 100), (91, 101), "same"),
        ((90, 100), (95, 101), "unresolved"),
        ((100, 100), (50, 100), "unresolved"),  # the largest alone is the same
        ((10, 200), (10, 201), "same"),
    ],
)
def test_a_peak_that_may_be_more_or_less_changes_where_all_of_it_does(before, after, due):
    old, new = (row(peak=most * MIB, span=(least * MIB, most * MIB)) for least, most in (before, after))
    (change,) = (
        each
        for each in compare([Comparison(old.case, (old,))], [Comparison(new.case, (new,))])
        if each.figure == "peak"
    )
    assert change.verdict == due
    assert ("MiB now" in change.reason) == (due == "unresolved")


def test_a_rung_that_this_version_does_not_know_is_unresolved():
    assert verdicts(row(), row(answer="nearly_exact"))["answer"] == "unresolved"


def test_one_process_of_the_baseline_in_each_run_is_too_little_to_call_its_time_the_same():
    assert verdicts(row(rounds=(1.0,)), row(rounds=(1.01,)))["time"] == "unresolved"
    assert verdicts(row(), row(rounds=(1.01,) * 3))["time"] == "same"


@pytest.mark.parametrize(
    ("old", "new", "due"),
    [
        (timed(1.1), timed(1.32), "worse"),
        (timed(1.1), timed(0.88), "better"),
        (timed(1.1, 0.001), timed(1.11, 0.001), "same"),
        (timed(1.1), timed(1.13), "unresolved"),
        (timed(1.1), timed(1.32, None), "unresolved"),
        (timed(1.1, 0.001, seconds=1.0), timed(1.1, 0.001, seconds=1.6), "same"),  # the machine is slower today
        (timed(1.1, 0.001, seconds=1.6), timed(1.4, 0.001, seconds=1.0), "worse"),  # or faster
    ],
)
def test_a_time_is_compared_as_a_multiple_of_its_own_baselines(old, new, due):
    assert verdicts(old, new)["time"] == due


@pytest.mark.parametrize(
    ("new", "shown"),
    [
        (timed(1.32), r"1\.20 x \(1\.1\d-1\.2\d\) \| worse"),
        (timed(1.13), r"1\.03 x \(0\.9\d-1\.0\d\) \| unresolved"),
        (timed(1.32, None), r"1\.20 x +\| unresolved \(too few rounds\)"),
    ],
)
def test_a_time_is_shown_with_where_its_ratio_lies(new, shown):
    text = changed.text(compare([Comparison(case(), (row(), timed(1.1)))], [Comparison(case(), (row(), new))]), [])
    assert re.search(shown, re.sub(" +", " ", text)), text


@pytest.mark.parametrize(
    ("rounds", "due", "reason"),
    [
        ((1.6, 1.7, 1.65), "unresolved", "this machine's hour"),
        ((0.5, 0.6, 0.55), "unresolved", "this machine's hour"),
        ((0.9, 1.2, 1.0), "unresolved", "0.90 to 1.20 x"),
        ((1.0, 1.01, 0.99), "same", ""),
    ],
)
def test_baselines_that_took_longer_may_have_met_a_slow_day(rounds, due, reason):
    (time,) = (each for each in compare([Comparison(case(), (row(),))], [Comparison(case(), (row(rounds=rounds),))])
               if each.figure == "time")  # fmt: skip
    assert time.verdict == due and not Condition.parse("time>10%").met(time)
    assert time.reason.startswith(reason) and bool(time.reason) == bool(reason)


def test_equal_runs_at_their_measured_scatter_are_hardly_ever_called_worse():
    random = Random(7)
    draws = (
        (timed(math.exp(random.gauss(0, 0.02)), 0.02), timed(math.exp(random.gauss(0, 0.02)), 0.02)) for _ in range(400)
    )
    counts = Counter(verdicts(*pair)["time"] for pair in draws)
    assert counts["worse"] + counts["better"] <= 3, "one in 1,000 is meant"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("bit_exact", "reassociated", "worse"),
        ("reassociated", "bit_exact", "better"),
        ("bit_exact", "reordered", "worse"),
        ("reordered", "reassociated", "better"),
        ("reordered", "approximate", "worse"),
        ("reordered", "diverged", "worse"),
        ("invalid", "reordered", "better"),
        ("reordered", "reordered", "same"),
        ("bit_exact", "diverged", "worse"),
        ("invalid", "bit_exact", "better"),
        ("invalid", "diverged", "unresolved"),
        ("approximate", "approximate", "same"),
    ],
)
def test_answers_are_ordered_by_the_ladder(old, new, told):
    assert verdicts(row(answer=old), row(answer=new))["answer"] == told


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e12, float("nan")])
def test_a_round_whose_clock_jumped_is_left_out(bad):
    jumped = Record(times=Times().model_copy(update={"step_seconds": (bad,)}))
    new = row(rounds=(1.6, 1.7, 1.65))
    (time,) = (each for each in compare([Comparison(case(), (row(),))], [
        Comparison(case(), (replace(new, records=(*new.records, jumped)),))]) if each.figure == "time")  # fmt: skip
    assert time.after == "1,650.0 ms"


def test_a_case_that_ran_and_no_longer_does_is_worse():
    found = verdicts(row(), row(status="oom_budget", answer=None, rounds=()))
    assert found == dict.fromkeys(("status", "answer", "peak", "time"), "worse")
    assert verdicts(row(status="timeout", answer=None, rounds=()), row())["status"] == "better"


@pytest.mark.parametrize("status", ["ok", "oom_budget"])
def test_a_wrong_answer_is_worse_than_none(status):
    old, new = row(status=status, answer=None), replace(row(answer="diverged"), answer_reason="it drifts away")
    changes = compare([Comparison(old.case, (old,))], [Comparison(new.case, (new,))])
    (change,) = [each for each in changes if each.figure == "answer"]
    assert (change.verdict, change.after, change.reason) == ("worse", "diverged", "it drifts away")
    assert Condition.parse("answer").met(change)
    assert "answer" not in verdicts(old, row())


@pytest.mark.parametrize(
    ("figure", "lost"),
    [("answer", {"answer": None}), ("peak>5%", {"peak": None}), ("time>10%", {"rounds": ()})],
)
def test_a_figure_that_is_lost_is_worse_and_fails_a_build(figure, lost):
    old, new = row(), replace(row(**lost), answer_reason="the untouched workload gave no reference")
    other = row("checkpoint")  # which is timed in both runs
    (change,) = (
        each
        for each in compare([Comparison(old.case, (old, other))], [Comparison(new.case, (new, other))])
        if each.after is None
    )
    assert change.verdict == "worse" and Condition.parse(figure).met(change)
    assert change.reason == ("the untouched workload gave no reference" if figure == "answer" else change.reason) != ""
    assert "worse (" in changed.text([change], [])
    assert verdicts(new, old).get(change.figure) is None, "a figure that is new is no loss"


def test_rows_of_a_run_without_times_are_compared_by_memory_and_answer_alone():
    rows = row(), row("checkpoint")
    untimed = row(rounds=()), row("checkpoint", rounds=(), peak=50 * MIB)
    changes = compare([Comparison(case(), rows)], [Comparison(case(), untimed)])
    shown = changed.text(changes, [])
    assert shown.startswith(
        "Of 4 figures: 0 worse, 0 unresolved, 1 better, 3 same.\n\nThe new run did not measure times: 2 "
    )
    assert "| time" not in shown and "| time" in changed.text(changes, [], everything=True)
    assert any(Condition.parse("time>10%").met(each) for each in changes), "a build that asks for times has none"
    stopped = compare(
        [Comparison(case(), rows)], [Comparison(case(), (untimed[0], row("checkpoint", rounds=(), status="crash")))]
    )
    assert [each.verdict for each in stopped if each.figure == "time"] == ["not measured", "worse"]


@pytest.mark.parametrize(
    ("new", "how"),
    [
        (row(peak=150 * MIB), "peak: 100 MiB before, 150 MiB now (1.500 x)"),
        (row(peak=None), "peak: 100 MiB before, unknown now (the new run does not have it)"),
        (row(answer="diverged"), "answer: bit_exact before, diverged now"),
        (replace(row(status="timeout"), reasons=("it hung",)), "status: ok before, timeout now (it hung)"),
    ],
)
def test_what_became_worse_is_said_with_its_figures_or_why_they_are_lost(new, how):
    changes = compare([Comparison(case(), (row(),))], [Comparison(case(), (new,))])
    assert how in [f"{change.figure}: {change.how}" for change in changes if change.verdict == "worse"]


def test_a_suite_that_was_not_run_again_is_named_and_none_of_its_rows_is_missing():
    old = [of(row(), "a"), of(row("checkpoint"), "a"), of(row("fused_loss"), "b"), of(row("tied"), "b")]
    before, after = ([Comparison(each.case, (each,)) for each in rows] for rows in (old, old[:1]))
    assert [change.case.label for change in compare(before, after) if change.figure == "missing"] == ["checkpoint"]
    assert of_suites(before, after) == ["The new run has no results of b: nothing is said of them."]
    assert of_suites(before, before) == []


def test_cases_of_one_run_alone_are_told():
    plain, extra = row(), row("checkpoint")
    found = compare([Comparison(plain.case, (plain, extra))], [Comparison(plain.case, (plain,))])
    assert [(c.figure, c.verdict, c.case.label) for c in found][-1] == ("missing", "worse", "checkpoint")
    found = compare([Comparison(plain.case, (plain,))], [Comparison(plain.case, (plain, extra))])
    assert [(c.figure, c.verdict, c.reason) for c in found][-1] == ("row", "new", "")
    assert changed.text(found, []).startswith(f"Of {len(found) - 1} figures: 0 worse, 0 unresolved, 0 better")
    assert "New rows: 1." in changed.text(found, [])


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [("ok", "diverged", "its answer is wrong: diverged"), ("error", None, "it broke"), ("ok", "bit_exact", "")],
)
def test_a_new_row_is_no_better_than_anything_and_says_what_is_wrong_with_it(status, answer, why):
    extra = replace(row("checkpoint", status=status, answer=answer), reasons=("it broke",) if status != "ok" else ())
    plain = row()
    found = compare([Comparison(plain.case, (plain,))], [Comparison(plain.case, (plain, extra))])
    (change,) = [each for each in found if each.case.label == "checkpoint"]
    assert (change.verdict, change.reason) == ("new", why)
    assert not any(Condition.parse(each).met(change) for each in ("answer", "status", "missing"))


def test_rows_of_suites_of_two_names_are_compared_where_the_cases_are_equal_and_that_is_said():
    before, after = ([Comparison(each.case, (each,))] for each in (of(row(), "a"), of(row(), "b")))
    assert {change.figure for change in compare(before, after)} >= {"peak"}
    assert of_suites(before, after) == ["Rows of a are compared with those of b: their cases are equal."]


def test_two_runs_of_many_rows_are_paired_without_a_search_for_each(monkeypatch):
    equalities = []

    class Digest(str):
        """A digest that counts what it is compared with."""

        __hash__ = str.__hash__

        def __eq__(self, other):
            equalities.append(1)
            return str.__eq__(self, other)

    of_case = Case.digest
    monkeypatch.setattr(Case, "digest", lambda self, *versions: Digest(of_case(self, *versions)))
    tables = [Comparison(case(), tuple(row(f"strategy{number}") for number in range(100)))]
    assert {change.verdict for change in compare(tables, tables)} == {"same"}
    assert len(equalities) < 20 * 100, "a search for each row takes 5,000 and more"


def test_a_condition_is_met_above_its_share_alone():
    found = compare([Comparison(case(), (row(),))], [Comparison(case(), (row(peak=104 * MIB),))])
    change = next(change for change in found if change.figure == "peak")
    assert Condition.parse("peak>3%").met(change) and Condition.parse("peak > 3.5 %").met(change)
    assert not Condition.parse("peak>5%").met(change) and not Condition.parse("time>1%").met(change)


@pytest.mark.parametrize("text", ["peak", "peak>5", "peak<5%", "answer>1%", "", "time>-1%", "__import__('os')"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConditionError, match="use peak>5%"):
        Condition.parse(text)


def test_other_machines_regimes_and_versions_are_told():
    old = [Record(origin=Origin(machine={"name": "a"}, versions={"torch": "1"}), memory=Memory(regime="pinned"))]
    new = [Record(origin=Origin(machine={"name": "b"}, versions={"torch": "2"}), memory=Memory(regime="native"))]
    told = " ".join(differences(old, new))
    assert "machine differs: a before, b after" in told and "other regimes" in told
    assert "version of torch differs: 1 before, 2 after" in told
    assert differences(old, old) == []


def test_the_text_shows_the_worst_first_and_hides_what_stayed():
    tables = [Comparison(case(), (row(), timed(1.0)))]
    after = [Comparison(case(), (row(), replace(timed(2.0), peak_bytes=50 * MIB)))]
    text = changed.text(compare(tables, after), ["<b>"])
    assert text.startswith("Of 6 figures: 1 worse, 0 unresolved, 1 better, 4 same.")
    lines = [line for line in text.splitlines() if "`checkpoint`" in line]
    assert "worse" in lines[0] and "2.00 x" in lines[0] and "better" in lines[1] and "0.50 x" in lines[1]
    assert "| baseline" not in text and "<b>" not in text
    assert "| baseline" in changed.text(compare(tables, after), [], everything=True)


@pytest.fixture
def compared(here, tmp_path):
    """Compare as the command line does, but within this process: to start another one takes longer."""

    def compared(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(words, *here(tmp_path, "compare", *words))

    return compared


def heavier(path: Path, to: Path, factor: float) -> Path:
    """Copy results with all peaks multiplied."""
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        figures = record.get("memory", record)  # side by side in the first format
        if "peak_host_bytes" in figures:
            figures["peak_host_bytes"] = int(figures["peak_host_bytes"] * factor)
        lines.append(json.dumps(record))
    to.write_text("\n".join(lines) + "\n")
    return to


def test_comparisons_that_differ_in_heads_stay_apart():
    def run(peak: int) -> list[Comparison]:
        rows = [row("checkpoint", peak=peak), row("checkpoint", peak=peak)]
        cases = [case("checkpoint").model_copy(update={"shape": {"tokens": 64, "heads": heads}}) for heads in (4, 8)]
        return [Comparison(one, (replace(each, case=one),)) for each, one in zip(rows, cases, strict=True)]

    shown = changed.text(compare(run(100 * MIB), run(150 * MIB)), [])
    assert [line[-7:] for line in shown.splitlines() if line.startswith("####")] == ["heads 4", "heads 8"]


def test_a_build_fails_on_what_became_worse_and_on_nothing_else(compared, tmp_path):
    (old,) = store.newest(ROOT / "results" / "losses")
    new = heavier(old, tmp_path / "new.jsonl", 1.2)
    same = compared(str(old), str(old), "--fail-on", "peak>5%", "--fail-on", "answer", "--fail-on", "status")
    assert (same.returncode, same.stderr) == (0, "") and " 0 worse" in same.stdout
    worse = compared(str(old), str(new), "--fail-on", "peak>5%")
    assert worse.returncode == 1 and "became worse" in worse.stderr and "1.20 x" in worse.stdout
    assert compared(str(old), str(new), "--fail-on", "peak>25%").returncode == 0
    assert compared(str(new), str(old), "--fail-on", "peak>5%").returncode == 0, "less is no failure"


def elsewhere(path: Path, to: Path, machine: str, factor: float) -> None:
    """Copy results as those of another machine, with all peaks multiplied."""
    to.parent.mkdir(parents=True)
    lines = [json.loads(line) for line in heavier(path, to, factor).read_text().splitlines()]
    for line in lines:
        line["origin"]["machine"] = {"name": machine}
    to.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_machine_is_compared_with_itself(compared, tmp_path):
    (path,) = store.newest(ROOT / "results" / "losses")
    for name, factor in (("old", 1.0), ("new", 1.2)):
        elsewhere(path, tmp_path / name / "a" / "x.jsonl", "a", factor)
        elsewhere(path, tmp_path / name / "b" / "x.jsonl", "b", 10.0)
    worse = compared(str(tmp_path / "old"), str(tmp_path / "new"), "--fail-on", "peak>5%")
    assert worse.returncode == 1 and "1.20 x" in worse.stdout and "10.00 x" not in worse.stdout, worse.stdout
    moved = compared(str(tmp_path / "old" / "a"), str(tmp_path / "new" / "b"), "--fail-on", "peak>5%")
    assert moved.returncode == 1 and "10.00 x" in moved.stdout, "one machine of each is compared, whatever its name"


def test_what_cannot_be_compared_is_refused_in_one_sentence(compared, tmp_path):
    losses, windows = (str(ROOT / "results" / name) for name in ("losses", "windowing"))
    for words, why in (
        ((losses, windows), "have no case in common"),
        ((losses, str(tmp_path / "none")), "name a results file or folder"),
        ((losses, losses, "--fail-on", "peak"), "use peak>5%"),
    ):
        refused = compared(*words)
        assert refused.returncode == 2 and refused.stderr.startswith("harness: ") and refused.stderr.count("\n") == 1
        assert why in refused.stderr


def of(each: Row, suite: str = "mine", machine: str = "m", utc: str = "") -> Row:
    """Return a row as one that was measured in a suite, on a machine, at an hour."""
    origin = Origin(suite=suite, machine={"name": machine}, utc=utc)
    return replace(each, records=tuple(record.model_copy(update={"origin": origin}) for record in each.records))


def headings(before: list[Row], after: list[Row]) -> list[str]:
    old, new = ([Comparison(each.case, (each,)) for each in rows] for rows in (before, after))
    return [line for line in changed.text(compare(old, new), []).splitlines() if line.startswith("####")]


def test_equal_comparisons_of_several_suites_and_machines_stand_apart():
    wheres = [("a", "m"), ("a", "n"), ("b", "m")]
    before, after = ([of(row(peak=peak * MIB), *where) for where in wheres] for peak in (100, 150))
    title = "decoder on torch/cpu, 64 tokens, bytes of x"
    assert headings(before, after) == [f"#### {suite}: {title}, on {machine}" for suite, machine in wheres]
    assert headings(before[:2], after[:2]) == [f"#### {title}, on m", f"#### {title}, on n"]
    assert headings(before[::2], after[::2]) == [f"#### a: {title}", f"#### b: {title}"]
    assert headings(before[:1], after[:1]) == [f"#### {title}"]


def test_what_is_missing_stands_with_the_machine_that_its_run_moved_to():
    before = [of(row()), of(row("checkpoint"))]
    assert len(headings(before, [of(row(peak=150 * MIB), machine="n")])) == 1


def test_what_runs_no_longer_stands_before_a_peak_that_grew():
    before = [Comparison(case(), (row(), row("a"), row("b"), row("c")))]
    failed = row("b", peak=None, rounds=(), answer=None, status="oom_budget")
    after = [Comparison(case(), (row(peak=103 * MIB), row("a", peak=120 * MIB), failed, row("c", peak=50 * MIB)))]
    lines = [line for line in changed.text(compare(before, after), []).splitlines() if line.startswith("| ")][1:]
    names = [line.split("|")[1].strip() for line in lines]
    assert names == ["`b`", "`b`", "`b`", "`b`", "`a`", "baseline", "`c`"]


@pytest.mark.parametrize("peak", [100, 120])
def test_a_third_machine_is_compared_with_the_newest_of_two_and_the_other_is_not_missing(peak):
    older = of(row(peak=100 * MIB), machine="a", utc="2026-01-01T00:00:00+00:00")
    newer = of(row(peak=120 * MIB), machine="b", utc="2026-01-02T00:00:00+00:00")
    third = of(row(peak=peak * MIB), machine="c")
    for before in ((older, newer), (newer, older)):
        changes = compare([Comparison(each.case, (each,)) for each in before], [Comparison(third.case, (third,))])
        assert {change.figure: change.verdict for change in changes} == {
            "answer": "same",
            "peak": "better" if peak == 100 else "same",
            "time": "same",
        }


def test_a_machine_that_measures_again_is_compared_with_itself_and_a_case_that_it_lacks_is_missing():
    rows = [of(each, machine=name) for each in (row(), row("checkpoint")) for name in ("a", "b")]
    before, after = ([Comparison(each.case, (each,)) for each in kept] for kept in (rows, rows[:1]))
    changes = compare(before, after)
    assert {change.figure for change in changes if change.case.label == "baseline"} == {"answer", "peak", "time"}
    lost = [(change.figure, change.verdict) for change in changes if change.case.label == "checkpoint"]
    assert set(lost) == {("missing", "worse")}


@pytest.mark.parametrize("limits", [True, False], ids=["limits", "predictions"])
def test_runs_without_a_figure_are_refused_as_such(limits, compared, tmp_path):
    plain = case()
    record = (
        Record(case=plain, limits=Fit(over="tokens", budget_bytes=MIB, predicted=64))
        if limits
        else Record(case=plain, slot=Slot(case=plain.digest(), kind="predict"))
    )
    path = tmp_path / "run.jsonl"
    path.write_bytes(store.encoded(record))
    refused = compared(str(path), str(path))
    assert refused.returncode == 2 and "have no figure to compare: measure the suite" in refused.stderr
    assert "in common" not in refused.stderr


def test_a_figure_stands_before_and_after_in_that_order():
    old, new = ([Comparison(case(), (each,))] for each in (row(), row(peak=150 * MIB)))
    lines = [line for line in changed.text(compare(old, new), []).splitlines() if line.startswith("|")]
    names, _, cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert names == ["case", "figure", "before", "after", "change", "verdict"]
    assert cells == ["baseline", "peak", "100 MiB", "150 MiB", "1.50 x", "worse"]


def test_a_case_that_two_other_machines_have_is_neither_missing_nor_new():
    old = of(row(), machine="c")
    first = of(row(peak=150 * MIB), machine="a", utc="2026-01-01T00:00:00+00:00")
    newest = of(row(peak=120 * MIB), machine="b", utc="2026-01-02T00:00:00+00:00")
    for after in ((first, newest), (newest, first)):
        changes = compare([Comparison(old.case, (old,))], [Comparison(each.case, (each,)) for each in after])
        assert {change.figure for change in changes} == {"answer", "peak", "time"}
        assert [change.ratio for change in changes if change.figure == "peak"] == [1.2], "that of the newest"
    beside = compare([Comparison(old.case, (old,))], [Comparison(each.case, (each,)) for each in (old, newest)])
    assert {change.figure: change.verdict for change in beside} == dict.fromkeys(("answer", "peak", "time"), "same")


def test_a_row_whose_run_did_not_time_its_baselines_is_not_taken_for_one():
    for old, new in ((timed(1.1), timed(1.1, seconds=1.6)), (timed(1.1, seconds=1.6), timed(1.1))):
        changes = compare([Comparison(old.case, (old,))], [Comparison(new.case, (replace(new, speed=None),))])
        (time,) = (each for each in changes if each.figure == "time")
        assert (time.verdict, time.reason) == (
            "unresolved",
            "a run has no time of its baselines, of which times are multiples",
        )


WORKLOADS = plugins.load().workloads


def sized(workload: str = "decoder", peak: int = 100 * MIB, **sizes: object) -> Comparison:
    """Return a judged run of one row with these sizes in its record, and no others."""
    plain = case().model_copy(update={"workload": workload, "shape": {"tokens": 64, **sizes}})
    return Comparison(plain, (replace(row(peak=peak), case=plain),))


def figures(old: Comparison, new: Comparison) -> set[str]:
    return {change.figure for change in compare(*(completed([each], WORKLOADS) for each in (old, new)))}


PAIRED = {"answer", "peak", "time"}
UNPAIRED = {"missing", "row"}


@pytest.mark.parametrize(
    ("sizes", "due"),
    [
        ({"positions": "rotary"}, PAIRED),
        ({"positions": "rotary", "head_bias": False, "stride": None}, PAIRED),
        ({"positions": "learned"}, UNPAIRED),
        ({"positions": "rotary", "heads": 8}, UNPAIRED),
        ({"positions": "rotary", "tokens": 65}, UNPAIRED),
    ],
)
def test_a_record_without_a_size_is_paired_with_its_default_and_with_no_other_value(sizes, due):
    assert figures(sized(), sized(**sizes)) == due == figures(sized(**sizes), sized())


def test_cases_differ_in_all_but_sizes_as_before():
    for other in ({"seed": 1}, {"corpus": "y"}, {"ranks": 2}, {"budget_bytes": MIB}):
        (changed_row,) = (new := sized(positions="rotary")).rows
        differs = changed_row.case.model_copy(update=other)
        assert figures(sized(), replace(new, case=differs, rows=(replace(changed_row, case=differs),))) == UNPAIRED


@pytest.mark.parametrize(
    ("workload", "sizes"),
    [("of_a_plugin_that_is_not_here", {}), ("decoder", {"a_size_of_old": 3}), ("causal_lm", {"config": "no file"})],
)
def test_a_case_that_its_workload_cannot_complete_stays_as_its_record_has_it(workload, sizes):
    old, new = sized(workload, **sizes), sized(workload, positions="rotary", **sizes)
    assert completed([old], WORKLOADS) == [old]
    assert figures(old, new) == UNPAIRED and figures(old, old) == PAIRED


def test_what_a_configuration_says_is_the_default_of_a_size():
    (old,) = completed([sized("causal_lm", config="smollm2-135m")], WORKLOADS)
    assert (old.case.shape["layers"], old.rows[0].case) == (30, old.case)


def test_a_row_that_only_one_run_has_stands_with_the_others_of_its_comparison():
    old, new = sized(), sized(positions="rotary", peak=200 * MIB)
    gone = replace(old.rows[0], case=old.case.model_copy(update={"strategies": (Applied(name="checkpoint"),)}))
    runs = (replace(old, rows=(*old.rows, gone)), new)
    shown = changed.text(compare(*(completed([each], WORKLOADS) for each in runs)), [])
    assert shown.count("####") == 1 and "missing" in shown


def without(path: Path, to: Path, size: str) -> Path:
    """Copy results as they were before their workload had a size."""
    lines = []
    for record in store.read(path)[0]:
        if record.case is not None and record.slot is not None:
            shape = {name: value for name, value in record.case.shape.items() if name != size}
            assert shape != record.case.shape
            old = record.case.model_copy(update={"shape": shape})
            record = record.model_copy(
                update={"case": old, "slot": record.slot.model_copy(update={"case": old.digest()})}
            )
        lines.append(store.encoded(record))
    to.write_bytes(b"".join(lines))
    return to


def test_the_command_pairs_records_made_before_a_size_was_there(compared, tmp_path):
    (new,) = store.newest(ROOT / "results" / "losses")
    old = without(new, tmp_path / "old.jsonl", "positions")
    same = compared(str(old), str(new))
    assert same.returncode == 0, same.stderr
    assert ": 0 worse, " in same.stdout and "missing" not in same.stdout
