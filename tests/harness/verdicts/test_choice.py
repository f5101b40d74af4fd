"""Which row of a comparison is named above its table."""

from dataclasses import replace
from typing import Any

import pytest

from harness import Place, Strategy
from harness.records import Applied, Case, Record
from harness.report.answer import sentence
from harness.verdicts.choice import choice, plainness
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import Speed


def row(*strategies: "str | Applied", peak: int, time: float = 1.0, **changes: Any) -> Row:
    applied = tuple(each if isinstance(each, Applied) else Applied(name=each) for each in strategies)
    case = Case(workload="w", shape={}, place="torch/cpu", corpus="x", tokenizer="bytes", strategies=applied)
    usual: dict[str, Any] = {
        "status": "ok",
        "peak_bytes": peak,
        "peak_ratio": peak / 1000,
        "memory": "less" if peak < 980 else "same",
        "answer": "bit_exact",
        "verdict": "wins",
        "speed": Speed(time, Interval(time * 0.98, time * 1.02), "open", 4, 9, 0.01, 9),
    }
    return Row(case, **(usual | changes))


BASELINE = row(peak=1000, verdict="baseline")
STANDS_IN = (Record(notes={"offloading": "stands in for a GPU"}),)


def chosen(*rows: Row, baseline: Row = BASELINE) -> "tuple[str | None, str | None]":
    made = choice(Comparison(BASELINE.case, (baseline, *rows)), {})
    assert made is not None
    return (made.row and made.row.label, made.inexact and made.inexact.label)


def test_the_leanest_that_costs_no_time_and_answers_as_before() -> None:
    slow, fast = row("slow", peak=300, time=1.4), row("fast", peak=500)
    assert chosen(slow, fast) == ("fast", None)
    assert chosen(slow) == ("slow", None), "where all cost time, the leanest"
    low = row("low", peak=200, answer="lower_precision")
    assert chosen(fast, low) == ("fast", "low"), "an inexact one beside it, where it takes less still"
    assert chosen(fast, row("low", peak=495, answer="lower_precision")) == ("fast", None)
    assert chosen(row("wrong", peak=100, answer="diverged", verdict="wrong"), fast) == ("fast", None)
    assert chosen(row("doubtful", peak=100, verdict="withheld"), fast) == ("fast", None)


def test_what_moves_nothing_on_this_machine_is_not_named() -> None:
    stand_in = row("offload", peak=300, records=STANDS_IN)
    assert chosen(stand_in, row("fast", peak=500)) == ("fast", None)


def test_what_saves_nothing_with_the_usual_allocator_is_not_named() -> None:
    pinned = row("pinned", peak=300, native_ratio=1.02)
    assert chosen(pinned, row("fast", peak=500, native_ratio=0.9)) == ("fast", None)
    assert chosen(row("low", peak=300, answer="approximate", native_ratio=1.6)) == (None, None)
    ran_out = row(peak=1000, verdict="fails", status="oom_budget")
    assert chosen(pinned, baseline=ran_out) == ("pinned", None), "it fits where the baseline does not"


def test_of_rows_as_lean_and_plain_the_fastest_and_then_the_one_that_moves_least_to_the_host() -> None:
    slow, fast = row("slow", peak=500, time=1.03), row("fast", peak=505, time=1.0)
    assert chosen(slow, fast) == ("fast", None)
    moves, stays = (
        row(name, peak=peak, speed=None, records=(Record(memory={"peak_host_bytes": host}),))
        for name, peak, host in (("moves", 500, 1 << 30), ("stays", 505, 1 << 28))
    )
    place = {"place": Place("jax", "cuda")}
    on_gpu = [replace(each, case=each.case.model_copy(update=place)) for each in (moves, stays)]
    assert chosen(*on_gpu) == ("stays", None)


@pytest.mark.parametrize("peak", [500, 508])
def test_of_rows_as_lean_the_plainest(peak: int) -> None:
    set_up = row(Applied(name="automatic", knobs={"threshold": 1}), peak=500)
    assert chosen(set_up, row("plain", peak=peak)) == ("plain", None)
    assert chosen(row("plain", "more", peak=500), row("plain", peak=peak)) == ("plain", None)
    assert chosen(set_up, row("plain", peak=515)) == ("automatic(threshold=1)", None), "3 % more is more"


@pytest.mark.parametrize(
    ("baseline", "other", "due"),
    [
        ("ok", {}, "Use **lean**"),
        ("ok", {"memory": "same"}, "No strategy here saves memory."),
        ("ok", {"memory": "more", "answer": None, "verdict": "withheld"}, "No strategy here saves memory."),
        ("ok", {"memory": None, "answer": None, "status": "unsupported"}, "No strategy here saves memory."),
        ("ok", {"memory": None, "answer": None, "status": "oom_host"}, "No strategy here saves memory."),
        ("ok", {"memory": None, "answer": None, "status": "open"}, ""),
        ("ok", {"memory": None, "answer": None, "status": "error"}, ""),
        ("ok", {"memory": None, "verdict": "withheld"}, ""),
        ("ok", {"answer": None, "verdict": "withheld"}, ""),
        ("ok", {"records": STANDS_IN}, ""),
        ("ok", {"native_ratio": 1.2}, "No strategy that answers as before saves memory with the usual allocator."),
        ("ok", {"answer": "diverged", "verdict": "wrong"}, "No strategy that answers as before was measured here."),
        ("skipped_guard", {}, "The rows cannot be compared: the baseline ended with skipped_guard."),
        ("timeout", {}, "The rows cannot be compared: the baseline ended with timeout."),
        ("error", {}, "The rows cannot be compared: the baseline ended with error."),
        ("open", {}, ""),
        ("error", {"status": "error"}, ""),
        ("oom_budget", {}, "The baseline runs out of memory; use **lean**"),
        ("oom_budget", {"answer": None}, ""),
        ("oom_budget", {"status": "error"}, ""),
        ("oom_budget", {"status": "oom_budget"}, "Nothing here fits the budget."),
        ("oom_host", {"status": "oom_host"}, "Nothing here fits this machine."),
    ],
)
def test_the_answer_says_no_more_than_the_baseline_allows(baseline: str, other: dict[str, Any], due: str) -> None:
    case = BASELINE.case.model_copy(update={"budget_bytes": 1 << 30})
    rows = (row(peak=1000, status=baseline), row("lean", peak=500, **other))
    said = sentence(Comparison(case, rows), {})
    assert said.startswith(due) and bool(said) == bool(due)


def test_where_the_baseline_runs_out_of_memory_all_that_run_are_looked_at() -> None:
    out = row(peak=1000, status="oom_budget", verdict="fails")
    same = row("same", peak=990, verdict="enables")
    assert chosen(same, baseline=out) == ("same", None) and chosen(same) == (None, None)


@pytest.mark.parametrize(
    ("status", "other", "lead"),
    [
        ("ok", {"memory": "same"}, "No strategy that answers as before saves memory here; in"),
        ("ok", {"answer": "approximate", "memory": None}, "No strategy that answers as before was measured here; in"),
        (
            "ok",
            {"status": "timeout", "memory": None},
            "Whether one that answers as before saves memory is not known; in",
        ),
        ("ok", {"status": "open", "answer": None}, "Whether one that answers as before saves memory is not known; in"),
        ("oom_budget", {"status": "oom_budget"}, "No exact row fits; in"),
        ("oom_budget", {"status": "timeout"}, "Whether one that answers as before fits is not known; in"),
        ("oom_budget", {"records": STANDS_IN}, "Whether one that answers as before fits is not known; in"),
    ],
)
def test_beside_an_inexact_row_no_more_is_said_of_the_others_than_is_known(
    status: str, other: dict[str, Any], lead: str
) -> None:
    rows = (row(peak=1000, status=status), row("low", peak=500, answer="lower_precision"), row("x", peak=400, **other))
    said = sentence(Comparison(BASELINE.case, rows), {})
    assert said.startswith(f"{lead} lower precision with **low**: ") and said.endswith("."), said


def test_where_no_strategy_was_measured_beside_the_baseline_nothing_is_said() -> None:
    assert sentence(Comparison(BASELINE.case, (BASELINE,)), {}) == ""


def test_of_rows_as_lean_none_that_is_surely_slower() -> None:
    faster = row(Applied(name="chunked", knobs={"chunk": 512}), peak=505, time=0.95)
    assert chosen(row("plain", peak=500, time=1.04), faster) == ("chunked(chunk=512)", None)
    assert chosen(row("plain", peak=500, time=0.97), faster) == ("plain", None), "they may take as long"
    narrow = row("narrow", peak=500, time=0.9, answer="lower_precision")
    assert chosen(narrow, row("other", peak=495, time=0.7, answer="approximate")) == (None, "narrow"), "it is closer"


@pytest.mark.parametrize(("every", "settings"), [(1, 0), (2, 1)])
def test_a_default_counts_as_no_setting_where_strategies_are_known(every: int, settings: int) -> None:
    def on_torch(parts: Any, every: int = 1) -> Any:
        return parts

    known = {"checkpoint": Strategy("checkpoint", rewrites=("stack",), on={"torch": on_torch}, about="Keep less.")}
    applied = Applied(name="checkpoint", knobs={"every": every}), Applied(name="stranger", knobs={"every": 1})
    case = row(*applied, peak=500).case
    assert plainness(case, known) == (2, settings + 1)
    assert plainness(case, {}) == (2, 2)


@pytest.mark.parametrize(
    ("speed", "due"),
    [
        (Speed(1.07, Interval(1.05, 1.09), "slower", 4, None, 0.01, 9), "lean"),
        (Speed(1.07, Interval(1.04, 1.10), "slower", 4, None, 0.01, 9), "fast"),
        (Speed(1.0, Interval(1.0, 1.0), "open", 1), "fast"),
        (None, "fast"),
    ],
    ids=["less than a tenth", "a tenth", "one round", "not timed"],
)
def test_the_leanest_is_preferred_where_it_surely_takes_less_than_a_tenth_longer(
    speed: "Speed | None", due: str
) -> None:
    assert chosen(row("lean", peak=300, speed=speed), row("fast", peak=500)) == (due, None)
