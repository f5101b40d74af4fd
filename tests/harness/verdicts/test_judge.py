"""Verdicts follow from the records alone: what is compared, what is withheld, what is never ranked."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness import Place
from harness.records import Applied, Case, Memory, Origin, Prediction, Record, Slot, Times
from harness.records.record import Verdict
from harness.records.roofline import Operations
from harness.verdicts.judge import Row, Table, judge

MIB = 1 << 20
CASE = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer="bytes")


def case_of(name: str, **changes: Any) -> Case:
    applied = () if name == "baseline" else tuple(Applied(name=part) for part in name.split("+"))
    return CASE.model_copy(update={"strategies": applied, **changes})


def member(
    name: str,
    peak: "int | Sequence[int] | None" = 100 * MIB,
    seconds: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    answer: "str | None" = "bit_exact",
    **memory: Any,
) -> list[Record]:
    """Make the records of one case: a prediction, an answer, peaks (one for each repeat) and times (one a round)."""
    case = memory.pop("case", case_of(name))
    key = case.digest()
    probe = f"probe of {key}"
    common = {"case": case, "position": memory.pop("position", 0)}
    verdict = Verdict(answer, 1.0, None, None, None, (), f"{answer} it is") if answer else None
    fields = {
        name: memory.pop(name) for name in ("status", "evidence", "flags", "notes", "extra", "origin") if name in memory
    }
    figures: dict[str, Any] = {"losses": (6.0, 5.9, 5.8), "batches_digest": "ab", "peak_phase": "loss", **memory}
    peaks = peak if isinstance(peak, Sequence) else [peak]
    return [
        Record(
            slot=Slot(case=key, kind="predict"),
            **common,
            prediction=Prediction(predicted_peak_bytes=100 * MIB, floor_bytes=50 * MIB),
        ),
        *([Record(slot=Slot(case=probe, kind="numerics"), numerics=verdict, **common)] if verdict else []),
        *(
            Record(
                slot=Slot(case=key, kind="memory", repeat=repeat),
                probe=probe,
                **fields,
                **common,
                memory=Memory(**{"peak_host_bytes": each, **figures}),
            )
            for repeat, each in enumerate(peaks)
        ),
        *(
            Record(
                slot=Slot(case=key, kind="time", round=number),
                **common,
                times=Times(step_seconds=(median, 2 * median, 0.1)),
            )
            for number, median in enumerate(seconds)
        ),
    ]


def judged(*members: list[Record]) -> Table:
    (table,) = judge(record for records in members for record in records)
    return table


def row_of(strategy: list[Record], baseline: "list[Record] | None" = None, *others: list[Record]) -> Row:
    """Judge one strategy beside a baseline and a clean control."""
    members = [baseline or member("baseline"), member("nothing"), strategy, *others]
    return judged(*members).rows[2]


FASTER, EQUAL, SLOWER = (0.8,) * 6, (1.0,) * 6, (1.25,) * 6
UNRESOLVED = (0.9, 1.1, 0.9, 1.1, 0.9, 1.1)


def test_memory_that_grows_with_each_step_is_told_where_the_baseline_does_not() -> None:
    five: dict[str, Any] = {"losses": (6.0, 5.9, 5.8, 5.7, 5.6)}
    leaking = member("checkpoint", slope_bytes_per_step=4.0 * MIB, resolution_bytes=MIB, **five)
    row = row_of(leaking)
    assert "growing" in row.flags and "it grew by 4.0 MiB with each step" in row.notes
    row = row_of(leaking, member("baseline", slope_bytes_per_step=3.5 * MIB, resolution_bytes=MIB, **five))
    assert "growing" not in row.flags, "what the baseline does as well is no leak of the strategy"
    for slope, flagged in ((4.0, False), (6.0, True)):
        alone = judged(member("baseline", slope_bytes_per_step=slope * MIB, **five)).rows[0]
        assert ("growing" in alone.flags) is flagged
    few = member("checkpoint", slope_bytes_per_step=4.0 * MIB, resolution_bytes=MIB)
    assert "growing" not in row_of(few).flags, "three steps are no proof"
    pages = member("checkpoint", slope_bytes_per_step=4.0 * MIB, flags=("file_backed",), **five)
    assert "growing" not in row_of(pages).flags, "the kernel takes them back"


def test_other_batches_make_an_answer_approximate_not_wrong() -> None:
    row = row_of(member("blocks", feeds="other", losses=(6.0, 5.95, 5.85), batches_digest="cd"))
    assert (row.answer, row.ranked) == ("approximate", True)
    assert row_of(member("blocks", losses=(6.0, 5.95, 5.85))).answer == "diverged"


def on(machine: str, found: list[Record]) -> list[Record]:
    return [record.model_copy(update={"origin": Origin(machine={"name": machine})}) for record in found]


def test_an_answer_is_that_of_the_machine_on_which_the_case_was_measured() -> None:
    """Groups share the slot of an answer, and a cluster measures them on several machines."""
    wrong, right = (on(name, member("checkpoint", answer=answer)) for name, answer in (("a", "diverged"), ("b", None)))
    for order in ([*wrong, *right], [*right, *wrong]):
        assert judged(on("b", member("baseline")), order).rows[1].answer == "diverged", "there is no other"
    answers = [record for record in on("b", member("checkpoint")) if record.slot and record.slot.kind == "numerics"]
    for order in ([*wrong, *answers, *right], [*answers, *wrong, *right]):
        assert judged(on("b", member("baseline")), order).rows[1].answer == "bit_exact"


def test_figures_of_two_machines_in_one_comparison_are_warned_of() -> None:
    one = judged(on("a", member("baseline")), on("a", member("checkpoint")))
    assert one.machines == ("a",) and not any("mixed" in note for note in one.notes)
    late = [record for record in on("b", member("checkpoint")) if record.slot and record.slot.kind == "time"]
    both = judged(on("a", member("baseline")), [*on("a", member("checkpoint")), *late[:1]])
    assert both.machines == ("a", "b")
    assert "Records of different machines are mixed here and do not compare." in both.notes


# The trade


@pytest.mark.parametrize(
    ("peak", "seconds", "memory", "speed", "verdict"),
    [
        (50, EQUAL, "less", "same", "wins"),
        (50, FASTER, "less", "faster", "wins"),
        (50, UNRESOLVED, "less", "unresolved", "wins"),
        (50, SLOWER, "less", "slower", "trades"),
        (100, EQUAL, "same", "same", "same"),
        (100, UNRESOLVED, "same", "unresolved", "same"),
        (100, FASTER, "same", "faster", "wins"),
        (100, SLOWER, "same", "slower", "loses"),
        (150, EQUAL, "more", "same", "loses"),
        (150, SLOWER, "more", "slower", "loses"),
        (150, FASTER, "more", "faster", "trades"),
    ],
)
def test_the_trade_is_named(peak: int, seconds: Sequence[float], memory: str, speed: str, verdict: str) -> None:
    row = row_of(member("checkpoint", peak * MIB, seconds))
    assert (row.memory, row.speed, row.verdict, row.ranked) == (memory, speed, verdict, True)
    assert row.peak_ratio == pytest.approx(peak / 100)
    assert row.effect is not None
    assert row.effect.rounds == 6
    assert row.label == "checkpoint"


def test_what_is_computed_of_the_figures() -> None:
    row = row_of(member("checkpoint", 80 * MIB, SLOWER))
    assert row.residual_ratio == pytest.approx(-0.2)
    assert row.floor_ratio == pytest.approx(1.6)
    assert row.step_median_seconds == 1.25, "the median of each round's median step"
    assert row.effect is not None
    assert row.effect.ratio == pytest.approx(1.25)
    assert row.loss_difference == 0
    assert (row.answer, row.peak_phase) == ("bit_exact", "loss")


def test_the_baseline_is_compared_with_nothing() -> None:
    row = judged(member("baseline"), member("nothing")).rows[0]
    assert (row.verdict, row.memory, row.effect, row.label) == ("baseline", None, None, "baseline")


@pytest.mark.parametrize(
    ("peak", "resolution", "expected"),
    [
        (99 * MIB, None, "same"),
        (99 * MIB - 1, None, "less"),
        (101 * MIB, None, "same"),
        (101 * MIB + 1, None, "more"),
        (97 * MIB, 3 * MIB, "same"),
        (97 * MIB - 1, 3 * MIB, "less"),
    ],
)
def test_a_difference_counts_beyond_one_percent_and_the_resolution(
    peak: int, resolution: "int | None", expected: str
) -> None:
    assert row_of(member("checkpoint", peak, resolution_bytes=resolution)).memory == expected


def test_the_largest_of_the_repeats_is_the_peak() -> None:
    row = row_of(member("checkpoint", (50 * MIB, 50 * MIB + 9, 50 * MIB + 5)))
    assert row.peak_bytes == 50 * MIB + 9
    assert "unstable" not in row.flags


def test_the_peak_of_a_device_is_the_device_s() -> None:
    place = {"place": Place("torch", "cuda")}
    members = [
        member(name, 100 * MIB, case=case_of(name, **place), peak_device_bytes=device * MIB)
        for name, device in (("baseline", 400), ("nothing", 400), ("checkpoint", 200))
    ]
    row = judged(*members).rows[2]
    assert (row.peak_bytes, row.memory, row.verdict) == (200 * MIB, "less", "wins")


# What fails, and what it enables


@pytest.mark.parametrize("status", ["oom_budget", "oom_host", "oom_device"])
def test_a_strategy_that_runs_where_the_baseline_does_not_fit_enables(status: str) -> None:
    baseline = member("baseline", None, (), None, status=status, evidence={"message": "full"})
    row = row_of(member("checkpoint"), baseline)
    assert (row.verdict, row.memory, row.peak_ratio, row.effect) == ("enables", None, None, None)
    assert row.ranked


@pytest.mark.parametrize("status", ["oom_budget", "oom_host", "timeout", "crash", "error", "invalid_output"])
def test_a_strategy_that_ends_badly_fails_with_its_reason(status: str) -> None:
    strategy = member("checkpoint", 70 * MIB, (), None, status=status, evidence={"message": "it ended"})
    row = row_of(strategy)
    assert (row.verdict, row.status, row.ranked, row.reasons) == ("fails", status, False, ("it ended",))
    assert (row.peak_ratio, row.memory) == (None, None), "the peak of a failure is no figure to compare"


def test_one_repeat_that_fails_fails_the_case() -> None:
    strategy = member("checkpoint", (50 * MIB, 50 * MIB))
    bad = strategy[-7].model_copy(update={"status": "crash", "evidence": {"message": "at random"}})
    assert bad.slot is not None
    assert (bad.slot.kind, bad.slot.repeat) == ("memory", 1)
    row = row_of([*strategy, bad])
    assert (row.status, row.verdict, row.reasons) == ("crash", "fails", ("at random",))


def test_a_baseline_that_crashed_enables_nothing() -> None:
    baseline = member("baseline", None, (), None, status="crash")
    assert row_of(member("checkpoint"), baseline).verdict == "withheld"


@pytest.mark.parametrize(("status", "verdict"), [("unsupported", "untested"), ("skipped_guard", "skipped")])
def test_what_was_not_run_is_not_judged(status: str, verdict: str) -> None:
    row = row_of(member("checkpoint", None, (), None, status=status, evidence={"message": "not here"}))
    assert (row.verdict, row.ranked, row.reasons, row.peak_bytes) == (verdict, False, ("not here",), None)


def test_a_case_whose_memory_is_not_measured_yet_is_untested() -> None:
    strategy = [record for record in member("checkpoint") if record.slot and record.slot.kind == "predict"]
    row = row_of(strategy)
    assert (row.status, row.verdict, row.ranked, row.peak_bytes) == ("open", "untested", False, None)


def test_a_missing_prediction_is_explained() -> None:
    strategy = member("checkpoint")
    strategy[0] = strategy[0].model_copy(
        update={"prediction": Prediction(), "missing": {"predicted_peak_bytes": "it cannot be traced"}}
    )
    row = row_of(strategy)
    assert (row.predicted_bytes, row.residual_ratio) == (None, None)
    assert row.reasons == ("no prediction: it cannot be traced",)


# Whether the answer is right


@pytest.mark.parametrize(
    ("answer", "ranked"),
    [
        ("bit_exact", True),
        ("reassociated", True),
        ("lower_precision", True),
        ("approximate", True),
        ("diverged", False),
        ("invalid", False),
    ],
)
def test_a_wrong_answer_is_shown_and_never_ranked(answer: str, ranked: bool) -> None:
    row = row_of(member("checkpoint", 10 * MIB, answer=answer))
    assert (row.answer, row.ranked) == (answer, ranked)
    assert row.answer_reason == f"{answer} it is"
    assert row.verdict == ("wins" if ranked else "wrong")
    assert row.peak_ratio == pytest.approx(0.1), "shown all the same"


def test_other_batches_make_the_answer_invalid() -> None:
    row = row_of(member("checkpoint", 10 * MIB, batches_digest="cd"))
    assert (row.answer, row.verdict, row.ranked) == ("invalid", "wrong", False)
    assert "other batches" in row.answer_reason


@pytest.mark.parametrize("answer", ["bit_exact", "reassociated"])
def test_losses_apart_from_the_baseline_s_diverge(answer: str) -> None:
    row = row_of(member("checkpoint", 10 * MIB, answer=answer, losses=(6.0, 5.9, 5.8 * 1.0002)))
    assert (row.answer, row.verdict, row.ranked) == ("diverged", "wrong", False)
    assert row.loss_difference == pytest.approx(2e-4)
    near = row_of(member("checkpoint", 10 * MIB, answer=answer, losses=(6.0, 5.9, 5.8 * 1.00005)))
    assert (near.answer, near.verdict) == (answer, "wins")


@pytest.mark.parametrize("answer", ["lower_precision", "approximate"])
def test_losses_apart_are_expected_of_what_declares_it(answer: str) -> None:
    row = row_of(member("checkpoint", 10 * MIB, answer=answer, losses=(6.0, 5.9, 5.81)))
    assert (row.answer, row.verdict) == (answer, "wins")
    assert row.loss_difference == pytest.approx(0.01 / 5.8)


def test_an_answer_that_could_not_be_compared_is_not_ranked() -> None:
    strategy = member("checkpoint", 10 * MIB, answer=None)
    probe = next(record.probe for record in strategy if record.probe)
    failed = Record(
        slot=Slot(case=probe, kind="numerics"),
        case=case_of("checkpoint"),
        status="crash",
        evidence={"message": "SIGSEGV"},
    )
    row = row_of([*strategy, failed])
    assert (row.answer, row.answer_reason) == (None, "SIGSEGV")
    assert not row.ranked, "nobody knows whether its answer is right"
    assert row.verdict != "wins"


# What is withheld


def test_memory_verdicts_are_withheld_when_the_control_differs() -> None:
    table = judged(member("baseline"), member("nothing", 103 * MIB), member("checkpoint", 50 * MIB, SLOWER))
    assert [row.memory for row in table.rows] == [None, None, None]
    assert [row.verdict for row in table.rows[1:]] == ["withheld", "withheld"]
    assert any("memory verdicts are withheld" in note for note in table.notes)
    assert table.rows[2].speed == "slower"
    assert not table.rows[2].ranked


def test_speed_verdicts_are_withheld_when_the_control_differs() -> None:
    table = judged(member("baseline"), member("nothing", seconds=(1.01,) * 6), member("checkpoint", 50 * MIB, SLOWER))
    assert [row.speed for row in table.rows] == [None, None, None]
    assert any("speed verdicts are withheld" in note for note in table.notes)
    assert table.rows[2].memory == "less"
    assert table.rows[2].effect is not None, "the ratio is shown all the same"


def test_a_clean_control_leaves_no_note_and_widens_the_margin() -> None:
    control = member("nothing", seconds=(1.04, 1.04, 1.04, 1.04, 1.04, 0.99))
    table = judged(member("baseline"), control, member("checkpoint", 50 * MIB, (1.03,) * 6))
    assert table.notes == ()
    assert table.rows[2].speed == "same", "3 % is less than two equal things differed by"
    assert row_of(member("checkpoint", 50 * MIB, (1.03,) * 6)).speed == "slower"


def test_without_a_control_there_is_no_speed_verdict() -> None:
    table = judged(member("baseline"), member("checkpoint", 50 * MIB, SLOWER))
    assert table.rows[1].speed is None
    assert table.rows[1].effect is not None


def test_few_rounds_earn_no_interval() -> None:
    row = row_of(member("checkpoint", 50 * MIB, (1.25,) * 2))
    assert (row.speed, row.verdict) == ("unresolved", "saves")
    assert row.effect is not None
    assert row.effect.level is None


def test_only_rounds_that_both_have_are_paired() -> None:
    strategy = member("checkpoint", 50 * MIB, SLOWER)
    strategy[-2] = strategy[-2].model_copy(update={"status": "timeout", "times": Times()})
    row = row_of(strategy, member("baseline", seconds=(1.0,) * 5))
    assert row.effect is not None
    assert row.effect.rounds == 4, "rounds 0 to 3: the fifth failed, the sixth has no partner"


def test_peaks_that_vary_are_unstable_and_not_ranked() -> None:
    row = row_of(member("checkpoint", (50 * MIB, 51 * MIB, 50 * MIB)))
    assert "unstable" in row.flags
    assert not row.ranked
    fine = row_of(member("checkpoint", (50 * MIB, 51 * MIB, 50 * MIB), resolution_bytes=MIB))
    assert "unstable" not in fine.flags


def test_peaks_of_a_device_that_vary_are_unstable() -> None:
    case = case_of("checkpoint", place=Place("torch", "cuda"))
    strategy = member("checkpoint", (9 * MIB, 9 * MIB), case=case, peak_device_bytes=50 * MIB)
    (index,) = [i for i, r in enumerate(strategy) if r.slot and r.slot.kind == "memory" and r.slot.repeat]
    strategy[index] = strategy[index].model_copy(update={"memory": Memory(peak_device_bytes=60 * MIB)})
    assert "unstable" in judged(strategy).rows[0].flags


@pytest.mark.parametrize(("peak", "off"), [(109, False), (111, True), (91, False), (89, True)])
def test_a_prediction_that_is_off_is_marked_but_ranked(peak: int, off: bool) -> None:
    row = row_of(member("checkpoint", peak * MIB))
    assert ("prediction_off" in row.flags) is off
    assert row.ranked


@pytest.mark.parametrize(
    "flag", ["unsettled", "no_reset", "native_regime", "lower_bound", "child_processes", "control_failed"]
)
def test_flags_of_a_doubtful_figure_keep_it_from_the_ranks(flag: str) -> None:
    row = row_of(member("checkpoint", 50 * MIB, flags=(flag, "noisy")))
    assert {flag, "noisy"} <= set(row.flags)
    assert not row.ranked
    assert row_of(member("checkpoint", 50 * MIB, flags=("noisy",))).ranked


# Grouping


def test_records_of_different_comparisons_do_not_meet() -> None:
    other = {"shape": {"tokens": 128}}
    members = [
        member("baseline", position=0),
        member("checkpoint", 50 * MIB, position=1),
        member("baseline", 800 * MIB, case=case_of("baseline", **other), position=2),
        member("checkpoint", 200 * MIB, case=case_of("checkpoint", **other), position=3),
    ]
    tables = judge(record for records in reversed(members) for record in reversed(records))
    assert [table.case.shape["tokens"] for table in tables] == [64, 128]
    assert [[row.label for row in table.rows] for table in tables] == 2 * [["baseline", "checkpoint"]]
    assert [table.rows[1].peak_ratio for table in tables] == [pytest.approx(0.5), pytest.approx(0.25)]


def test_the_later_attempt_counts() -> None:
    first = member("checkpoint", None, (), None, status="killed_unknown", evidence={"message": "ended by SIGKILL"})
    row = row_of([*first, *member("checkpoint", 50 * MIB)])
    assert (row.status, row.verdict, row.reasons) == ("ok", "wins", ())


def test_a_comparison_without_its_baseline_claims_nothing() -> None:
    row = judged(member("checkpoint", 50 * MIB)).rows[0]
    assert (row.memory, row.speed, row.effect, row.peak_ratio, row.verdict) == (None, None, None, None, "withheld")


def test_records_that_belong_nowhere_are_passed_over() -> None:
    stray = [Record(), Record(slot=Slot(case="x", kind="memory")), Record(case=CASE)]
    assert judge(stray) == []
    assert judge([]) == []
    assert len(judge([*stray, *member("baseline")])) == 1


def with_work(records: list[Record], flops: float, rates: "dict[str, Any] | None") -> list[Record]:
    work = (Operations("float32", flops, 8),)
    first, *rest = records
    prediction = first.prediction.model_copy(update={"predicted_work": work})
    origin = Origin(machine={"rates": rates} if rates else {})
    return [first.model_copy(update={"prediction": prediction, "origin": origin}), *rest]


def test_the_time_to_expect_follows_from_the_work_and_the_rates_of_the_machine() -> None:
    rates = {"bandwidth": 1e9, "flops": {"float32": 1e6}}
    baseline, own = with_work(member("baseline"), 1e6, rates), with_work(member("checkpoint"), 1.5e6, rates)
    assert row_of(own, baseline).predicted_time_ratio == pytest.approx(1.5)
    assert row_of(with_work(member("checkpoint"), 1.5e6, None), baseline).predicted_time_ratio is None
    assert row_of(member("checkpoint")).predicted_time_ratio is None
    (table,) = judge(record for records in (baseline, member("nothing"), own) for record in records)
    assert table.rows[0].predicted_time_ratio is None


@pytest.mark.parametrize(("peak", "verdict"), [(50, "saves"), (100, "same"), (150, "costs")])
def test_one_round_says_nothing_about_speed(peak: int, verdict: str) -> None:
    row = row_of(member("checkpoint", peak * MIB, (3.9,)), member("baseline", seconds=(1.0,)))
    assert row.effect is not None and row.effect.rounds == 1
    assert row.verdict == verdict
