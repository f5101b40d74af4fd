"""What to use against what sets a peak: the row that saves most, and where the strategy saves nothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from harness import Strategy
from harness.contract import kinds
from harness.contract.place import Place
from harness.records import Applied, Case, Record
from harness.report.typical import line
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import Speed
from harness.verdicts.remedies import DIVIDED, NARROW, OF_KIND, SETS, remedies, sets, typical

LOGITS = "the logits of the loss"


def strategy(name: str, *rewrites: str, **declared: Any) -> Strategy:
    return Strategy(name, rewrites=rewrites, on={}, about="Keep less.", **declared)


STRATEGIES = {
    each.name: each
    for each in (strategy("cut", "loss"), strategy("chunked", "loss"), strategy("narrow", "draw", precision="bfloat16"))
}


def row(
    *names: str,
    ratio: float,
    time: float = 1.0,
    backend: str = "torch",
    tokens: int = 64,
    knobs: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Row:
    case = Case(
        workload="decoder",
        shape={"tokens": tokens},
        place=f"{backend}/cpu",
        corpus="x",
        tokenizer="bytes",
        strategies=tuple(Applied(name=name, knobs=knobs or {}) for name in names),
    )
    usual: dict[str, Any] = {
        "status": "ok",
        "peak_bytes": int(1000 * ratio),
        "peak_ratio": ratio,
        "memory": "less" if ratio < 0.98 else "same",
        "answer": "reassociated",
        "verdict": "wins",
        "speed": Speed(time, Interval(time * 0.98, time * 1.02), "open", 4, 9, 0.01, 9),
    }
    return Row(case, **(usual | changes))


def table(*rows: Row) -> Comparison:
    return Comparison(rows[0].case, rows)


@pytest.mark.parametrize(
    ("one", "what"),
    [
        (strategy("a", "loss"), LOGITS),
        (strategy("a", "grad"), "what layers keep for the backward pass"),
        (strategy("a", "grad", precision="bfloat16"), NARROW),
        (strategy("a", "init", "update"), "moments and gradients"),
        (strategy("a", "init", "grad", "update"), "moments and gradients"),
        (strategy("a", "grad", "draw"), "what layers keep for the backward pass"),
        (strategy("a", "rows", "windows", "order"), "rows, windows, batches and words of the data"),
        (strategy("a", "evaluate"), "an evaluation, a checkpoint that is saved or read"),
        (strategy("a", "save"), "an evaluation, a checkpoint that is saved or read"),
        (strategy("a", "step", ranks=True), DIVIDED),
        (strategy("a"), None),
    ],
)
def test_a_strategy_is_against_what_its_parts_keep(one: Strategy, what: str | None) -> None:
    assert sets(one) == what


def test_the_row_that_saves_most_at_little_cost_is_named_and_then_what_saves_more_for_more_time() -> None:
    cheap, lean = row("chunked", ratio=0.4), row("cut", ratio=0.2, time=1.5)
    best, dearer = remedies([("losses", [table(cheap, lean)])], STRATEGIES)
    assert (best.sets, best.best.row, best.best.folder, best.exact) == (LOGITS, cheap, "losses", True)
    assert (dearer.sets, dearer.best.row, dearer.exact) == (LOGITS, lean, True)
    faster = row("cut", ratio=0.21, time=1.3)
    _, dearer = remedies([("losses", [table(cheap, lean, faster)])], STRATEGIES)
    assert dearer.best.row is faster, "for less than a tenth more nobody gives up time"
    (best,) = remedies([("losses", [table(lean)])], STRATEGIES)
    assert best.best.row is lean, "where all cost time, the leanest"
    (best,) = remedies([("losses", [table(cheap, row("cut", ratio=0.37, time=1.5))])], STRATEGIES)
    assert best.best.row is cheap, "for so little nobody gives up time"


def test_what_moves_nothing_on_this_machine_is_no_remedy() -> None:
    stand_in = row("cut", ratio=0.2, records=(Record(notes={"offloading": "stands in for a GPU"}),))
    assert remedies([("losses", [table(stand_in)])], STRATEGIES) == []
    assert typical("cut", [("losses", [table(stand_in)])]) != []


def test_of_rows_that_save_as_much_the_plainest_is_named_and_then_the_fastest() -> None:
    set_by_hand = row("cut", ratio=0.200, knobs={"threshold_gib": 0.1})
    plain, slower = row("chunked", ratio=0.203, time=1.01), row("chunked", ratio=0.202, time=1.015)
    (best,) = remedies([("losses", [table(set_by_hand, slower, plain)])], STRATEGIES)
    assert best.best.row is plain
    (best,) = remedies([("losses", [table(set_by_hand, row("chunked", ratio=0.21))])], STRATEGIES)
    assert best.best.row is set_by_hand, "more than 2 % less"
    (best,) = remedies([("losses", [table(set_by_hand, row("chunked", ratio=0.2, time=1.3))])], STRATEGIES)
    assert best.best.row is set_by_hand, "it surely takes longer"
    leanest, faster = row("chunked", ratio=0.2, time=1.04), row("cut", ratio=0.202, time=0.95, knobs={"chunk": 512})
    (best,) = remedies([("losses", [table(leanest, faster)])], STRATEGIES)
    assert best.best.row is faster, "the leanest surely takes longer, however plain it is"


def test_a_row_of_one_round_does_not_surely_take_longer() -> None:
    once = Speed(1.3, Interval(1.3, 1.3), "open", 1)
    set_by_hand = row("cut", ratio=0.2, knobs={"threshold_gib": 0.1})
    (best,) = remedies([("losses", [table(set_by_hand, row("chunked", ratio=0.2, speed=once))])], STRATEGIES)
    assert best.best.row.label == "chunked", "the plainest of those that may take no longer"
    fast = replace(set_by_hand, speed=Speed(1.0, Interval(1.0, 1.0), "open", 1))
    (best,) = remedies([("losses", [table(fast, row("chunked", ratio=0.2, time=1.5))])], STRATEGIES)
    assert best.best.row.label == "chunked", "the other may take as long"


def test_of_rows_of_one_round_the_one_that_seemed_faster_is_named_and_what_was_not_timed_comes_last() -> None:
    slow, fast = (Speed(ratio, Interval(ratio, ratio), "open", 1) for ratio in (1.3, 1.1))
    rows = [
        row("cut", ratio=0.200, speed=None),
        row("cut", ratio=0.201, speed=slow),
        row("cut", ratio=0.202, speed=fast),
    ]
    (best,) = remedies([("losses", [table(each) for each in rows])], STRATEGIES)
    assert best.best.row is rows[2]


def test_a_setting_that_is_the_default_anyway_makes_a_row_no_less_plain() -> None:
    def every(parts: Any, each: int = 1) -> Any:
        return parts

    strategies = STRATEGIES | {"cut": Strategy("cut", rewrites=("loss",), on={"torch": every}, about="Keep less.")}
    for each, label in ((1, "cut(each=1)"), (2, "chunked")):
        rows = row("chunked", ratio=0.2, time=1.01), row("cut", ratio=0.2, knobs={"each": each})
        (best,) = remedies([("losses", [table(*rows)])], strategies)
        assert best.best.row.label == label


def test_rows_that_save_nothing_are_kept_in_sight() -> None:
    helps, idle = row("cut", ratio=0.2), row("cut", ratio=1.0, tokens=8)
    (best,) = remedies([("losses", [table(helps)]), ("attention", [table(idle)])], STRATEGIES)
    assert best.count == 2 and [each.folder for each in best.idle] == ["attention"]


def test_each_backend_has_its_own_and_a_leaner_inexact_one_follows() -> None:
    rows = [
        row("cut", ratio=0.3),
        row("chunked", ratio=0.2, answer="approximate"),
        row("chunked", ratio=0.9, answer="approximate", backend="jax"),
    ]
    answers = remedies([("losses", [table(each) for each in rows])], STRATEGIES)
    assert [(each.backend, each.exact) for each in answers] == [("torch", True), ("torch", False), ("jax", False)]


@pytest.mark.parametrize(
    "changes",
    [{"answer": "diverged"}, {"answer": None}, {"status": "oom_budget"}, {"memory": None}, {"peak_ratio": None}],
    ids=str,
)
def test_a_wrong_or_withheld_row_is_no_remedy(changes: dict[str, Any]) -> None:
    assert remedies([("losses", [table(row("cut", ratio=0.2, **changes))])], STRATEGIES) == []


def test_combinations_and_strangers_are_left_out() -> None:
    rows = [row("cut", "narrow", ratio=0.1), row("stranger", ratio=0.1), row(ratio=1.0)]
    assert remedies([("losses", [table(*rows)])], STRATEGIES) == []


def test_what_is_typical_is_the_median_of_rows_alone() -> None:
    rows = [row("cut", ratio=ratio, time=time) for ratio, time in ((0.2, 1.0), (0.6, 1.1), (1.0, 1.2))]
    (torch,) = typical("cut", [("losses", [table(each) for each in rows])])
    assert (torch.count, torch.less, torch.peak_ratio, torch.lowest, torch.highest) == (3, 2, 0.6, 0.2, 1.0)
    assert torch.time_ratio == pytest.approx(1.1)
    assert typical("nobody", [("losses", [table(*rows)])]) == []


@pytest.mark.parametrize(("native", "count"), [(None, 1), (0.99, 1), (1.0, 0), (1.04, 0)])
def test_what_takes_no_less_with_the_usual_allocator_is_no_remedy(native: float | None, count: int) -> None:
    assert len(remedies([("losses", [table(row("cut", ratio=0.9, native_ratio=native))])], STRATEGIES)) == count


def test_rows_with_other_settings_are_not_counted() -> None:
    best, idle = row("cut", ratio=0.5), row("cut", ratio=1.0, knobs={"chunk": 1})
    (answer,) = remedies([("losses", [table(best, idle)])], STRATEGIES)
    assert (answer.count, answer.idle) == (1, ())


def test_every_kind_of_memory_has_what_is_against_it() -> None:
    known = {what for what, _ in SETS} | {NARROW}
    assert set(OF_KIND) == set(kinds.KINDS) - {"workspace"} and set(OF_KIND.values()) <= known


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, "0.50 x the memory at 1.00 x the time (1 row timed); less"),
        (2, "0.50 x the memory on each rank at 1.00 x the time (1 row timed); less"),
    ],
)
def test_what_is_typical_on_ranks_is_of_each(ranks: int, words: str) -> None:
    alone = row("cut", ratio=0.5)
    own = replace(alone, case=alone.case.model_copy(update={"ranks": ranks}))
    (torch,) = typical("cut", [("losses", [table(own)])])
    assert words in line(torch)


def test_rows_on_a_gpu_stand_apart() -> None:
    here = row("lean", ratio=0.5)
    there = replace(here, case=here.case.model_copy(update={"place": Place("torch", "cuda")}))
    answers = remedies([("suite", [table(here), table(there)])], {"lean": strategy("lean", "loss")})
    assert [(each.backend, each.count) for each in answers] == [("torch", 1), ("torch on a GPU", 1)]


@pytest.mark.parametrize(("ratio", "count"), [(0.94, 1), (0.95, 0)])
def test_what_takes_less_than_a_twentieth_away_is_no_remedy(ratio: float, count: int) -> None:
    assert len(remedies([("losses", [table(row("cut", ratio=ratio))])], STRATEGIES)) == count


def test_what_may_take_longer_is_not_named_first_however_much_it_saves() -> None:
    cheap = row("chunked", ratio=0.4, knobs={"chunk": 512})
    unsure = row("cut", ratio=0.2, speed=Speed(1.1, Interval(0.98, 1.25), "open", 4, 9, 0.05, 9))
    assert [each.best.row for each in remedies([("losses", [table(cheap, unsure)])], STRATEGIES)] == [cheap, unsure]
