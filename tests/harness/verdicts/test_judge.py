"""Verdicts follow from the records alone: what is compared, what is withheld, what is never ranked."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import Place
from harness.records import Applied, Case, Heading, Memory, Origin, Phase, Prediction, Rank, Record, Slot, Times
from harness.records.record import Verdict
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row, judge, trade
from harness.verdicts.pooled import MARGIN, Speed, word_of
from harness.verdicts.remarks import WITHHELD
from harness.verdicts.times import beside

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
                times=Times(step_seconds=(1.1 * median, 9 * median, 0.9 * median)),
            )
            for number, median in enumerate(seconds)
        ),
    ]


def judged(*members: list[Record]) -> Comparison:
    (table,) = judge(record for records in members for record in records)
    return table


def row_of(strategy: list[Record], baseline: "list[Record] | None" = None, *others: list[Record]) -> Row:
    """Judge one strategy beside a baseline, a clean control and one more."""
    members = [baseline or member("baseline"), member("nothing"), strategy, member("fused_loss"), *others]
    return judged(*members).rows[2]


FASTER, EQUAL, SLOWER = (0.8,) * 6, (1.0,) * 6, (1.25,) * 6
SCATTERED = (0.9, 1.1, 0.9, 1.1, 0.9, 1.1)


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
    there: dict[str, Any] = {"case": case_of("checkpoint", place=Place("torch", "cuda")), "peak_device_bytes": 9 * MIB}
    (row,) = judged(member("checkpoint", slope_bytes_per_step=6.0 * MIB, **there, **five)).rows
    assert "the host's memory grew by 6.0 MiB with each step" in row.notes


def test_a_repetition_that_was_ended_from_outside_spoils_nothing() -> None:
    baseline, strategy = member("baseline"), member("checkpoint", 50 * MIB)
    (first,) = (
        each for each in strategy if each.slot is not None and each.slot.kind == "memory" and not each.slot.repeat
    )
    slot = first.slot.model_copy(update={"repeat": 1})
    withdrawn = first.model_copy(update={"slot": slot, "status": "killed_unknown", "memory": Memory()})
    assert row_of([*strategy, withdrawn], baseline).verdict == row_of(strategy, baseline).verdict != "fails"


def test_a_ratio_of_what_libraries_take_is_none() -> None:
    def native(name: str, peak: int) -> list[Record]:
        records = member(name)
        return [
            each.model_copy(update={"times": each.times.model_copy(update={"native_peak_host_bytes": peak})})
            if each.times.step_seconds else each
            for each in records
        ]  # fmt: skip

    assert row_of(native("checkpoint", 40 * MIB), native("baseline", 80 * MIB)).native_ratio == 0.5
    small = row_of(native("checkpoint", 21 * MIB), native("baseline", 8192))
    assert small.native_ratio is None and small.native_bytes == (21 * MIB, 21 * MIB)


def test_what_is_not_known_of_the_host_withholds_no_verdict_about_a_device() -> None:
    flags = {"flags": ("child_processes", "native_regime")}

    def on_device(name: str, peak: int, **more: Any) -> list[Record]:
        figures = {"peak_host_bytes": 9 * MIB, "peak_device_bytes": peak, **more}
        return member(name, **figures, case=case_of(name, place=Place("torch", "cuda")))

    members = [on_device("baseline", 100 * MIB), on_device("checkpoint", 50 * MIB, **flags)]
    assert judged(*members).rows[1].verdict == "wins"
    assert row_of(member("checkpoint", 50 * MIB, **flags)).verdict == "withheld"


def test_other_batches_make_an_answer_approximate_not_wrong() -> None:
    row = row_of(member("blocks", feeds="other", losses=(6.0, 5.95, 5.85), batches_digest="cd"))
    assert (row.answer, row.verdict) == ("approximate", "same")
    assert row_of(member("blocks", losses=(6.0, 5.95, 5.85))).answer == "diverged"


@pytest.mark.parametrize(("step", "answer"), [(9, "diverged"), (10, "reassociated")])
def test_losses_are_compared_as_long_as_training_has_not_multiplied_their_rounding(step: int, answer: str) -> None:
    losses = tuple(6.0 - number / 10 for number in range(24))
    off = tuple(loss * (1 + 2e-4 * (number >= step)) for number, loss in enumerate(losses))
    row = row_of(member("blocks", answer="reassociated", losses=off), member("baseline", losses=losses))
    assert row.answer == answer


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
    ("peak", "seconds", "memory", "time", "verdict"),
    [
        (50, EQUAL, "less", "within 5 %", "wins"),
        (50, FASTER, "less", "faster", "wins"),
        (50, SCATTERED, "less", "open", "saves, time open"),
        (50, SLOWER, "less", "slower", "trades"),
        (100, EQUAL, "same", "within 5 %", "same"),
        (100, SCATTERED, "same", "open", "same, time open"),
        (100, FASTER, "same", "faster", "wins"),
        (100, SLOWER, "same", "slower", "loses"),
        (150, EQUAL, "more", "within 5 %", "loses"),
        (150, SLOWER, "more", "slower", "loses"),
        (150, SCATTERED, "more", "open", "costs, time open"),
        (150, FASTER, "more", "faster", "trades"),
    ],
)
def test_the_trade_is_named(peak: int, seconds: Sequence[float], memory: str, time: str, verdict: str) -> None:
    row = row_of(member("checkpoint", peak * MIB, seconds))
    assert row.speed is not None
    assert (row.memory, row.speed.word, row.verdict) == (memory, time, verdict)
    assert row.peak_ratio == pytest.approx(peak / 100)
    assert row.speed.rounds == (6 if "open" in verdict else 4), "what is decided at a look is not asked again"
    assert row.label == "checkpoint"


@pytest.mark.parametrize("memory", ["less", "same", "more"])
@given(low=st.floats(0.5, 2), wider=st.floats(1, 1.5), at=st.floats(0, 1))
def test_a_trade_never_says_more_than_the_interval(memory: str, low: float, wider: float, at: float) -> None:
    interval = Interval(low, low * wider)
    ratio = low * wider**at
    speed = Speed(ratio, interval, word_of(ratio, interval), 6, None, 0.01, 10)
    verdict = trade(memory, speed)
    if verdict == "wins":
        assert interval.high < MARGIN and memory != "more"
    if verdict == "loses":
        assert interval.low > 1 / MARGIN and memory != "less"
    if verdict == "trades":
        assert (memory, speed.word) in (("less", "slower"), ("more", "faster"))


def test_what_is_computed_of_the_figures() -> None:
    row = row_of(member("checkpoint", 80 * MIB, SLOWER), member("baseline", seconds=(2.0,) * 6))
    assert row.residual_ratio == pytest.approx(-0.2)
    assert row.residual_bytes == -20 * MIB
    assert row.floor_ratio == pytest.approx(1.6)
    assert row.speed is not None
    both = 2.0**0.5  # the control takes 1 s, and ratios are to the mean of both on the ln scale
    assert row.step_seconds == pytest.approx(both * row.speed.ratio), "the mean of both times the paired ratio"
    assert row.loss_difference == 0
    assert (row.answer, row.peak_phase) == ("bit_exact", "loss")


def test_the_baseline_is_compared_with_nothing() -> None:
    row = judged(member("baseline"), member("nothing")).rows[0]
    assert (row.verdict, row.memory, row.speed, row.label) == ("baseline", None, None, "baseline")
    assert row.step_seconds == 1.0


@pytest.mark.parametrize(
    ("peak", "resolution", "expected"),
    [
        (98 * MIB, None, "same"),
        (98 * MIB - 1, None, "less"),
        (102 * MIB, None, "same"),
        (102 * MIB + 1, None, "more"),
        (97 * MIB, 3 * MIB, "same"),
        (97 * MIB - 1, 3 * MIB, "less"),
    ],
)
def test_a_difference_counts_beyond_two_percent_and_the_resolution(
    peak: int, resolution: "int | None", expected: str
) -> None:
    assert row_of(member("checkpoint", peak, resolution_bytes=resolution)).memory == expected


def test_peaks_of_a_device_are_as_exact_as_its_allocator() -> None:
    """The slack of the kernel's counters, 6 MiB with 16 processors, is that of the host's meter."""

    def on_place(device: str, name: str, *peaks: int) -> list[Record]:
        place: dict[str, Any] = {"case": case_of(name, place=Place("torch", device)), "resolution_bytes": 6 * MIB}
        records = member(name, [peak * MIB for peak in peaks], (), **place)
        for index, record in enumerate(records):
            if record.slot and record.slot.kind == "memory":
                peak = {"peak_device_bytes": record.memory.peak_host_bytes}
                records[index] = record.model_copy(update={"memory": record.memory.model_copy(update=peak)})
        return records

    host, device = (
        judged(on_place(each, "baseline", 100), on_place(each, "checkpoint", 95, 97)).rows[1]
        for each in ("cpu", "cuda")
    )
    assert (host.memory, host.resolution, "unstable" in host.flags) == ("same", 6 * MIB, False)
    assert (device.memory, device.resolution, "unstable" in device.flags) == ("less", 512, True)


@pytest.mark.parametrize(
    ("control", "peak", "expected"),
    [(103, 94, "same"), (103, 93, "less"), (97, 106, "same"), (97, 107, "more"), (101, 97, "less")],
)
def test_a_control_that_differs_widens_what_must_differ_and_withholds_nothing(
    control: int, peak: int, expected: str
) -> None:
    table = judged(member("baseline"), member("nothing", control * MIB), member("checkpoint", peak * MIB))
    row = table.rows[2]
    assert row.memory == expected
    assert row.verdict != "withheld"
    assert any("a difference counts here from twice that" in note for note in table.notes) == (control != 101)


def test_a_control_whose_peak_cannot_be_relied_on_hides_no_saving() -> None:
    def with_control(**more: Any) -> Comparison:
        return judged(member("baseline"), member("nothing", 120 * MIB, **more), member("checkpoint", 70 * MIB))

    sound, doubtful = with_control(), with_control(flags=("unsettled",))
    assert [table.rows[2].memory for table in (sound, doubtful)] == ["same", "less"]
    assert [table.rows[2].margin_bytes for table in (sound, doubtful)] == [40 * MIB, 2 * MIB]
    assert [any("from twice that" in note for note in table.notes) for table in (sound, doubtful)] == [True, False]


# The allocator as the system has it


def with_natives(records: list[Record], *peaks: int) -> list[Record]:
    """Give the timed processes peaks of their own, in MiB, in turn."""
    timed = 0
    for index, record in enumerate(records):
        if record.slot and record.slot.kind == "time":
            native = {"native_peak_host_bytes": peaks[timed % len(peaks)] * MIB}
            records[index] = record.model_copy(update={"times": record.times.model_copy(update=native)})
            timed += 1
    return records


@pytest.mark.parametrize(
    ("native", "note"),
    [
        (100, "it saves 50% of the peak, but nothing with the usual allocator"),
        (160, "but nothing with"),
        (90, "it saves 50% of the peak, but only 10% with"),
        (73, None),
        (50, None),
    ],
)
def test_a_saving_that_hardly_reaches_a_user_is_noted(native: int, note: "str | None") -> None:
    row = row_of(
        with_natives(member("checkpoint", 50 * MIB), native, native + 2), with_natives(member("baseline"), 100, 102)
    )
    assert row.native_bytes == (native * MIB, (native + 2) * MIB)
    assert row.native_ratio == pytest.approx((native + 1) / 101)
    assert [note in each for each in row.notes if "saves" in each] == ([] if note is None else [True])


def test_a_small_saving_is_not_noted_and_a_device_has_no_such_peak() -> None:
    small = row_of(with_natives(member("checkpoint", 96 * MIB), 100), with_natives(member("baseline"), 100))
    assert small.notes == ()
    on_device = {"place": Place("torch", "cuda")}
    members = [
        with_natives(member(name, case=case_of(name, **on_device), peak_device_bytes=peak * MIB), 100)
        for name, peak in (("baseline", 400), ("checkpoint", 100))
    ]
    row = judged(*members).rows[1]
    assert (row.native_bytes, row.native_ratio, row.notes) == (None, None, ())


@pytest.mark.parametrize(
    "beyond",
    [
        {"peak_phase": "evaluate"},
        {"peak_phase": "evaluate, save"},
        {"peak_phase": "save"},
        {"flags": ("child_processes",), "children": 8},
    ],
)
def test_timed_processes_are_not_compared_where_they_lack_what_sets_the_peak(beyond: dict[str, Any]) -> None:
    def of(name: str, peak: int, children: int = 0, **more: Any) -> list[Record]:
        seen = {"child_peak_bytes": children * MIB, "child_peak_bound_bytes": children * MIB} if children else {}
        records = with_natives(member(name, peak * MIB, **more), 100)
        return [each.model_copy(update=seen) if each.slot and each.slot.kind == "memory" else each for each in records]

    for one, other in (({}, beyond), (beyond, {}), (beyond, beyond)):
        row = row_of(of("checkpoint", 50, **one), of("baseline", 100, **other))
        assert row.native_ratio is None and not any("saves" in note for note in row.notes)
        assert row.native_bytes == (100 * MIB, 100 * MIB)


def test_ranks_in_one_process_are_said_to_be_in_one() -> None:
    whole = row_of(member("checkpoint", all_ranks_bytes=200 * MIB, case=case_of("checkpoint", ranks=2)))
    assert "the 2 ranks are devices of one process, which holds 200 MiB for all of them" in whole.notes


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
    row = judged(baseline, member("checkpoint")).rows[1]
    assert (row.verdict, row.memory, row.peak_ratio, row.speed) == ("enables", None, None, None)


def out_of_memory(name: str) -> list[Record]:
    return member(name, None, (), None, status="oom_budget", evidence={"message": "full"})


def test_the_control_enables_nothing_where_it_just_passes() -> None:
    control = judged(out_of_memory("baseline"), member("nothing")).rows[1]
    assert (control.verdict, control.reasons) == ("control", ())


@pytest.mark.parametrize("name", ["checkpoint", "nothing"])
def test_a_row_whose_answer_is_not_known_enables_nothing(name: str) -> None:
    row = judged(out_of_memory("baseline"), member(name, answer=None)).rows[1]
    reason = "no verdict: its answer was not compared: run the suite again, which goes on where it stopped"
    assert (row.verdict, row.reasons) == ("withheld", (reason,))


@pytest.mark.parametrize("flag", WITHHELD)
def test_a_row_whose_peak_is_doubtful_enables_nothing(flag: str) -> None:
    row = judged(out_of_memory("baseline"), member("checkpoint", flags=(flag,))).rows[1]
    assert (row.verdict, row.reasons) == ("withheld", (f"no verdict: {WITHHELD[flag]}",))


def test_a_row_without_a_peak_enables_nothing() -> None:
    row = judged(out_of_memory("baseline"), member("checkpoint", None)).rows[1]
    assert (row.verdict, row.reasons) == ("withheld", ("no verdict: a peak is missing: run `harness doctor`",))


@pytest.mark.parametrize("status", ["oom_budget", "oom_host", "timeout", "crash", "error", "invalid_output"])
def test_a_strategy_that_ends_badly_fails_with_its_reason(status: str) -> None:
    strategy = member("checkpoint", 70 * MIB, (), None, status=status, evidence={"message": "it ended"})
    row = row_of(strategy)
    assert (row.verdict, row.status, row.reasons) == ("fails", status, ("it ended",))
    assert (row.peak_ratio, row.memory) == (None, None), "the peak of a failure is no figure to compare"


def test_a_run_that_gave_no_valid_result_has_no_answer_and_lends_none() -> None:
    failed: dict[str, Any] = {"status": "invalid_output", "evidence": {"message": "losses are not finite: nan"}}
    table = judged(member("baseline", **failed), member("checkpoint", **failed), member("fused_loss"))
    assert [row.answer for row in table.rows] == [None, None, None]
    assert [row.answer_reason.split(" measured")[0] for row in table.rows] == ["its", "its", "the baseline's"]
    assert row_of(member("checkpoint", answer="invalid", **failed)).answer == "invalid", "a wrong one stands"
    assert row_of(member("checkpoint", status="oom_host")).answer == "bit_exact", "at the small size it was seen"


def test_one_repeat_that_fails_fails_the_case() -> None:
    strategy = member("checkpoint", (50 * MIB, 50 * MIB))
    bad = strategy[-7].model_copy(update={"status": "crash", "evidence": {"message": "at random"}})
    assert bad.slot is not None
    assert (bad.slot.kind, bad.slot.repeat) == ("memory", 1)
    row = row_of([*strategy, bad])
    assert (row.status, row.verdict, row.reasons) == ("crash", "fails", ("at random",))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("crash", "ended with crash: mend that, and run the suite with --fresh"),
        ("skipped_guard", "was not started: run the suite again with --try-all, and without --max-bytes"),
        ("killed_unknown", "was killed, nobody can say by what: run the suite again, which goes on where it stopped"),
    ],
)
def test_a_baseline_that_did_not_end_well_enables_nothing(status: str, reason: str) -> None:
    row = row_of(member("checkpoint"), member("baseline", None, (), None, status=status))
    assert (row.verdict, row.reasons) == ("withheld", (f"no verdict: the baseline {reason}",))


@pytest.mark.parametrize(("asked", "shown"), [(160 * MIB, "160"), (MIB, "1"), (MIB // 4, "0.25"), (512, "0.00049")])
def test_what_was_asked_for_when_memory_ran_out_is_never_nothing(asked: int, shown: str) -> None:
    evidence = {"request_bytes": asked, "phase": "loss"}
    row = row_of(member("checkpoint", None, (), None, status="oom_budget", evidence=evidence))
    assert row.reasons == (f"asked for {shown} MiB more in loss",)


@pytest.mark.parametrize(
    ("kind", "said", "shown"),
    [
        ("KeyError", "'layers.0'", "KeyError: 'layers.0' (in backward)"),
        ("AssertionError", "", "AssertionError (in backward)"),
        ("ValueError", "chunk is 0: give 1 or more", "chunk is 0: give 1 or more (in backward)"),
    ],
)
def test_an_error_is_shown_with_its_kind_unless_it_explains_itself(kind: str, said: str, shown: str) -> None:
    evidence = {"exception": kind, "message": said, "phase": "backward"}
    row = row_of(member("checkpoint", None, (), None, status="error", evidence=evidence))
    assert row.reasons == (shown,)


@pytest.mark.parametrize(("status", "verdict"), [("unsupported", "untested"), ("skipped_guard", "skipped")])
def test_what_was_not_run_is_not_judged(status: str, verdict: str) -> None:
    row = row_of(member("checkpoint", None, (), None, status=status, evidence={"message": "not here"}))
    assert (row.verdict, row.reasons, row.peak_bytes) == (verdict, ("not here",), None)


def test_a_case_whose_memory_is_not_measured_yet_is_untested() -> None:
    strategy = [record for record in member("checkpoint") if record.slot and record.slot.kind == "predict"]
    row = row_of(strategy)
    assert (row.status, row.verdict, row.peak_bytes) == ("open", "untested", None)


def test_a_missing_prediction_is_explained() -> None:
    strategy = member("checkpoint")
    strategy[0] = strategy[0].model_copy(
        update={"prediction": Prediction(), "missing": {"predicted_peak_bytes": "it cannot be traced"}}
    )
    row = row_of(strategy)
    assert (row.predicted_bytes, row.residual_ratio) == (None, None)
    assert row.reasons == ("no prediction: it cannot be traced",)


def test_an_error_that_ends_the_prediction_as_well_is_said_once() -> None:
    evidence = {"exception": "KeyError", "message": "'x'", "line": "mine.py:3", "phase": "backward"}
    strategy = member("checkpoint", None, (), None, status="error", evidence=evidence)
    strategy[0] = strategy[0].model_copy(
        update={"prediction": Prediction(), "missing": {"predicted_peak_bytes": "KeyError: 'x' (mine.py:3)"}}
    )
    assert row_of(strategy).reasons == ("KeyError: 'x' (mine.py:3, in backward)",)


# Whether the answer is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("bit_exact", True),
        ("reassociated", True),
        ("lower_precision", True),
        ("approximate", True),
        ("diverged", False),
        ("invalid", False),
    ],
)
def test_a_wrong_answer_is_shown_and_earns_no_verdict(answer: str, right: bool) -> None:
    row = row_of(member("checkpoint", 10 * MIB, answer=answer))
    assert row.answer == answer
    assert row.answer_reason == f"{answer} it is"
    assert row.verdict == ("wins" if right else "wrong")
    assert row.peak_ratio == pytest.approx(0.1), "shown all the same"


def test_other_batches_make_the_answer_invalid() -> None:
    row = row_of(member("checkpoint", 10 * MIB, batches_digest="cd"))
    assert (row.answer, row.verdict) == ("invalid", "wrong")
    assert "other batches" in row.answer_reason


@pytest.mark.parametrize("answer", ["bit_exact", "reassociated"])
def test_losses_apart_from_the_baseline_s_diverge(answer: str) -> None:
    row = row_of(member("checkpoint", 10 * MIB, answer=answer, losses=(6.0, 5.9, 5.8 * 1.0002)))
    assert (row.answer, row.verdict) == ("diverged", "wrong")
    assert row.loss_difference == pytest.approx(2e-4)
    near = row_of(member("checkpoint", 10 * MIB, answer=answer, losses=(6.0, 5.9, 5.8 * 1.00005)))
    assert (near.answer, near.verdict) == ("reassociated", "wins"), "whatever it is at the small size"
    assert answer != "bit_exact" or near.answer_reason == (
        "equal in each bit at the small size; at this one losses differ by 5.0e-05"
    )
    assert row_of(member("checkpoint", 10 * MIB, answer=answer)).answer == answer


@pytest.mark.parametrize("answer", ["lower_precision", "approximate"])
def test_losses_apart_are_expected_of_what_declares_it(answer: str) -> None:
    row = row_of(member("checkpoint", 10 * MIB, answer=answer, losses=(6.0, 5.9, 5.81)))
    assert (row.answer, row.verdict) == (answer, "wins")
    assert row.loss_difference == pytest.approx(0.01 / 5.8)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        ("crash", "mend that, and run the suite with --fresh"),
        ("killed_unknown", "run the suite again, which goes on where it stopped"),
    ],
)
def test_an_answer_that_could_not_be_compared_withholds_the_verdict(status: Any, remedy: str) -> None:
    strategy = member("checkpoint", 10 * MIB, answer=None)
    probe = next(record.probe for record in strategy if record.probe)
    failed = Record(
        slot=Slot(case=probe, kind="numerics"),
        case=case_of("checkpoint"),
        status=status,
        evidence={"message": "SIGSEGV"},
    )
    row = row_of([*strategy, failed])
    assert (row.answer, row.answer_reason) == (None, "SIGSEGV")
    assert row.verdict == "withheld", "nobody knows whether its answer is right"
    assert row.reasons == (f"no verdict: its answer could not be compared: {remedy}",)
    (reason,) = row_of(strategy).reasons
    assert reason.startswith("no verdict: its answer was not compared: run the suite again")


@pytest.mark.parametrize(("answer", "shown"), [("reassociated", True), ("diverged", True), ("approximate", False)])
def test_what_the_comparison_of_an_answer_warned_of_is_noted_where_it_is_judged(answer: str, shown: bool) -> None:
    warning = "bias is 0.74 of the gradient error: a small wrong scale may hide in it"
    verdict = Verdict(answer, 1.0, 0.74, None, None, (warning,), "why")
    records = [
        record.model_copy(update={"numerics": verdict}) if record.numerics is not None else record
        for record in member("checkpoint", answer=answer)
    ]
    assert (warning in row_of(records).notes) is shown


# What is withheld


def test_repetitions_that_vary_are_flagged_and_judged_by_every_pair_of_them() -> None:
    row = row_of(member("checkpoint", (50 * MIB, 51 * MIB, 50 * MIB)))
    assert ("unstable" in row.flags, row.memory, row.verdict) == (True, "less", "wins"), "each of them is less"
    assert row.peak_ratio == pytest.approx(0.51)
    between = row_of(member("checkpoint", (97 * MIB, 99 * MIB, 97 * MIB)))
    assert (between.memory, between.verdict) == (None, "withheld"), "one is less, one the same"
    (reason,) = between.reasons
    assert reason.startswith(
        "no verdict: repetitions of it or of the baseline differ, and not all of them give the same"
    )
    fine = row_of(member("checkpoint", (50 * MIB, 51 * MIB, 50 * MIB), resolution_bytes=MIB))
    assert ("unstable" in fine.flags, fine.verdict) == (False, "wins")


def test_a_baseline_that_varies_takes_no_verdict_from_what_is_far_from_it() -> None:
    baseline = member("baseline", (98 * MIB, 100 * MIB, 99 * MIB))
    far, near = (row_of(member("checkpoint", peak * MIB), baseline) for peak in (50, 97))
    assert ("unstable" in judged(baseline).rows[0].flags, far.verdict) == (True, "wins")
    assert (near.memory, near.verdict) == (None, "withheld"), "2 % less than one of them, 1 % less than another"


def test_peaks_of_a_device_that_vary_are_unstable() -> None:
    case = case_of("checkpoint", place=Place("torch", "cuda"))
    strategy = member("checkpoint", (9 * MIB, 9 * MIB), case=case, peak_device_bytes=50 * MIB)
    (index,) = [i for i, r in enumerate(strategy) if r.slot and r.slot.kind == "memory" and r.slot.repeat]
    strategy[index] = strategy[index].model_copy(update={"memory": Memory(peak_device_bytes=60 * MIB)})
    assert "unstable" in judged(strategy).rows[0].flags


@pytest.mark.parametrize(("peak", "off"), [(109, False), (111, True), (91, False), (89, True)])
def test_a_prediction_that_is_off_is_marked_but_judged(peak: int, off: bool) -> None:
    row = row_of(member("checkpoint", peak * MIB))
    assert ("prediction_off" in row.flags) is off
    assert row.memory == ("more" if peak > 100 else "less")


def test_a_residual_of_a_peak_below_32_mib_is_not_marked() -> None:
    small = {"prediction": Prediction(predicted_peak_bytes=10 * MIB)}
    first, *rest = member("checkpoint", 20 * MIB)
    row = row_of([first.model_copy(update=small), *rest])
    assert row.residual_bytes == 10 * MIB
    assert "prediction_off" not in row.flags


@pytest.mark.parametrize("flag", WITHHELD)
def test_a_doubtful_figure_earns_no_verdict_and_the_row_says_what_to_do(flag: str) -> None:
    row = row_of(member("checkpoint", 50 * MIB, flags=(flag, "noisy")))
    assert {flag, "noisy"} <= set(row.flags)
    assert (row.memory, row.verdict, row.reasons) == (None, "withheld", (f"no verdict: {WITHHELD[flag]}",))
    doubtful = row_of(member("checkpoint", 50 * MIB), member("baseline", flags=(flag,)))
    assert (doubtful.verdict, doubtful.reasons) == ("withheld", (f"no verdict: of the baseline, {WITHHELD[flag]}",))
    assert row_of(member("checkpoint", 50 * MIB, flags=("noisy",))).verdict == "wins"


def test_what_is_doubtful_about_the_memory_of_a_timed_process_is_no_flag_of_the_peak() -> None:
    flags = [(*WITHHELD, "noisy"), *[()] * 5]
    row = row_of(rounds_of(member("checkpoint", 99 * MIB), flags=flags, status=["crash", *["ok"] * 5]))
    assert (row.flags, row.memory, row.verdict) == (("noisy",), "same", "same")


def test_child_processes_are_no_reason_where_the_word_for_memory_is_known() -> None:
    children = {"child_peak_bytes": 10 * MIB, "child_peak_bound_bytes": 40 * MIB}

    def with_children(peak: int, answer: "str | None") -> Row:
        records = member("checkpoint", peak * MIB, answer=answer)
        return row_of([
            record.model_copy(update=children) if record.slot and record.slot.kind == "memory" else record
            for record in records
        ])  # fmt: skip

    known = with_children(10, None)
    answer = "no verdict: its answer was not compared: run the suite again, which goes on where it stopped"
    assert (known.memory, known.verdict, known.reasons) == ("less", "withheld", (answer,))
    hanging = with_children(80, "bit_exact")
    assert (hanging.memory, hanging.reasons) == (
        None,
        ("no verdict: whether it takes more hangs on what its child processes share, see their bounds",),
    )


def test_a_row_that_ran_out_of_its_budget_by_its_child_processes_says_so() -> None:
    children = {"child_peak_bytes": 30 * MIB, "child_peak_bound_bytes": 40 * MIB}
    records = [
        record.model_copy(update=children) if record.slot and record.slot.kind == "memory" else record
        for record in member("checkpoint", 90 * MIB, case=case_of("checkpoint", budget_bytes=100 * MIB))
    ]
    (row,) = judged(records).rows
    assert (row.status, row.verdict) == ("oom_budget", "fails")
    assert row.reasons == ("with its child processes it took at least 20.0 MiB more than its budget",)


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
    assert (row.memory, row.speed, row.peak_ratio, row.verdict) == (None, None, None, "withheld")
    assert row.step_seconds == 1.0, "its own"
    assert row.reasons == ("no verdict: its baseline is not among these records: run the whole suite",)


def test_records_that_belong_nowhere_are_passed_over() -> None:
    stray = [Record(), Record(slot=Slot(case="x", kind="memory")), Record(case=CASE)]
    assert judge(stray) == []
    assert judge([]) == []
    assert len(judge([*stray, *member("baseline")])) == 1


# Times that say little, and times that nobody may believe


def rounds_of(records: list[Record], **changes: Any) -> list[Record]:
    """Change the records of all timed processes; a list has one value for each round."""
    number = 0
    changed = []
    for record in records:
        if record.slot and record.slot.kind == "time":
            own = {name: each[number] if isinstance(each, list) else each for name, each in changes.items()}
            record, number = record.model_copy(update=own), number + 1
        changed.append(record)
    return changed


def steps(*seconds: float) -> Times:
    """Make the times of a process, whatever they are: unchecked."""
    return Times().model_copy(update={"step_seconds": seconds})


@pytest.mark.parametrize(("peak", "verdict"), [(50, "saves"), (100, "same memory"), (150, "costs")])
def test_one_round_says_nothing_about_time(peak: int, verdict: str) -> None:
    row = row_of(member("checkpoint", peak * MIB, (3.9,)), member("baseline", seconds=(1.0,)))
    assert row.speed is not None
    assert (row.speed.word, row.speed.rounds, row.speed.standard_error) == ("open", 1, None)
    assert row.verdict == verdict


def test_two_members_have_a_range_and_no_word_in_three_rounds_and_a_word_in_four() -> None:
    for rounds, word, verdict in ((3, "open", "saves"), (4, "slower", "trades")):
        pair = member("baseline", seconds=EQUAL[:rounds]), member("checkpoint", 50 * MIB, SLOWER[:rounds])
        row = judged(*pair).rows[1]
        assert row.speed is not None
        assert (row.speed.word, row.speed.ratio, row.verdict) == (word, pytest.approx(1.25), verdict)


def test_an_open_row_says_how_many_more_rounds_would_decide_it() -> None:
    row = row_of(member("checkpoint", 50 * MIB, SCATTERED))
    assert row.speed is not None and row.speed.more_rounds is not None
    assert (row.speed.word, row.verdict) == ("open", "saves, time open")
    assert 1 <= row.speed.more_rounds <= 100


def test_a_control_that_came_out_slower_is_said_and_decides_nothing() -> None:
    table = judged(
        member("baseline"), member("nothing", seconds=(1.1,) * 6), member("checkpoint", 50 * MIB, SLOWER), member("b")
    )
    assert table.control is not None and table.control.ratio == pytest.approx(1.1, abs=0.01)
    assert any("rows are compared with both" in note for note in table.notes)
    assert table.rows[2].speed is not None and table.rows[2].speed.word == "slower"


def test_a_clean_control_leaves_no_note() -> None:
    assert judged(member("baseline"), member("nothing"), member("checkpoint"), member("fused_loss")).notes == ()


@pytest.mark.parametrize("bad", [0.0, -1.0, 1e12, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["baseline", "checkpoint", "nothing"])
def test_a_clock_that_jumped_leaves_its_process_out_and_the_row_says_so(bad: float, name: str) -> None:
    times = [steps(1.0, 1.0), steps(1.0, bad), *[steps(1.0, 1.0)] * 4]
    members = [member(each) for each in ("baseline", "nothing", "checkpoint", "fused_loss")]
    table = judged(*(rounds_of(each, times=times) if each[0].case == case_of(name) else each for each in members))
    row = next(row for row in table.rows if row.label == name)
    assert "impossible_times" in row.flags
    assert "1 timed process left out: their clock gave times that no step can take" in row.notes
    assert row.step_seconds == pytest.approx(1.0)
    speeds = [row.speed for row in table.rows if row.speed is not None]
    assert speeds and all(speed.word == "within 5 %" for speed in speeds)
    assert all("impossible_times" not in row.flags for row in table.rows if row.label != name)


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_row_whose_clock_never_worked_has_no_time(bad: float) -> None:
    row = row_of(rounds_of(member("checkpoint", 50 * MIB), times=steps(bad, bad)))
    assert (row.speed, row.step_seconds, row.verdict) == (None, None, "saves")
    assert "6 timed processes left out: their clock gave times that no step can take" in row.notes


def test_a_baseline_that_died_halfway_leaves_words_to_what_it_saw() -> None:
    dead = [*["ok"] * 2, *["crash"] * 4]
    baseline = rounds_of(member("baseline"), status=dead)
    row = row_of(member("checkpoint", 50 * MIB, SLOWER), baseline)
    assert row.speed is not None and row.speed.word == "slower", "the control is a baseline as well"
    table = judged(baseline, member("checkpoint", 50 * MIB, SLOWER))
    speed = table.rows[1].speed
    assert speed is not None and (speed.word, speed.ratio) == ("open", pytest.approx(1.25))
    assert table.rows[1].verdict == "saves"


def test_a_machine_that_steals_half_of_the_time_earns_no_wrong_word_and_is_flagged() -> None:
    draw = random.Random(5)
    wrong = 0
    for _ in range(40):
        names = ("baseline", "nothing", "checkpoint", "fused_loss", "offload", "blocks")
        members = [
            rounds_of(
                member(name),
                times=[steps(*[1.0 + (draw.random() < 0.5)] * 2) for _ in range(6)],
                flags=("stolen",),
            )
            for name in names
        ]
        table = judged(*members)
        assert all("stolen" in row.flags for row in table.rows)
        wrong += any(row.speed is not None and row.speed.word in ("slower", "faster") for row in table.rows[2:])
    assert wrong <= 2, "all are equal"


def test_only_complete_rounds_are_judged() -> None:
    """Interrupted in mid-round: the run will time the round again whole, and must not have decided by a part of it."""
    members = [
        member("baseline", seconds=(*SCATTERED, 1.0)),
        member("nothing", seconds=SCATTERED[::-1]),
        member("checkpoint", 50 * MIB, (*SCATTERED[1:], 0.9, 9.0)),
        member("fused_loss", seconds=SCATTERED[::-1]),
    ]
    row = judged(*members).rows[2]
    complete = judged(*members[:2], member("checkpoint", 50 * MIB, (*SCATTERED[1:], 0.9)), members[3]).rows[2]
    assert row.speed is not None and complete.speed is not None
    assert (row.speed.rounds, row.speed.ratio) == (6, complete.speed.ratio)


def test_a_round_that_was_timed_again_counts_as_its_newest_run_timed_it() -> None:
    """The blocks of the second try may be others, and the first try's processes have no neighbours any more."""

    def of_run(records: list[Record], run: str, block: int) -> list[Record]:
        """Put the last round into a block of a later run."""
        case = records[0].slot.case if records[0].slot else ""
        slots = [Slot(case=case, kind="time", round=number, block=block if number == 5 else 0) for number in range(6)]
        return rounds_of(records, slot=slots, origin=[Origin(run_id="1")] * 5 + [Origin(run_id=run)])

    names = ("baseline", "nothing", "checkpoint", "fused_loss")
    second = [of_run(member(name, seconds=SCATTERED), "2", 1) for name in names]
    first = of_run(member("checkpoint", seconds=(*SCATTERED[:5], 9.0)), "1", 0)
    stale = [record for record in first if record.slot and (record.slot.kind, record.slot.round) == ("time", 5)]
    for order in ([*second, stale], [stale, *second]):
        row = next(row for row in judged(*order).rows if row.label == "checkpoint")
        timed = [record.slot.round for record in row.records if record.slot and record.slot.kind == "time"]
        assert timed == list(range(6))
        assert row.speed is not None and row.speed.ratio == pytest.approx(1.0)


def test_a_member_that_failed_in_a_round_does_not_hold_it_up() -> None:
    failing = rounds_of(member("checkpoint", 50 * MIB, SLOWER), status=[*["ok"] * 4, "timeout", "ok"])
    row = row_of(failing)
    assert row.speed is not None
    assert (row.speed.rounds, row.speed.word) == (4, "slower"), "decided at the look after four rounds"


@pytest.mark.parametrize("count", [1, 5, 6])
def test_a_row_says_how_many_of_its_timed_processes_did_not_finish(count: int) -> None:
    late = {"message": "not finished after 600 s"}
    status, evidence = ["timeout"] * count + ["ok"] * (6 - count), [late] * count + [{}] * (6 - count)
    times = [Times()] * count + [steps(1.0, 1.0)] * (6 - count)
    records = rounds_of(member("checkpoint", 50 * MIB), status=status, evidence=evidence, times=times)
    row = row_of(records)
    assert f"{count} of 6 timed processes did not finish: not finished after 600 s" in row.notes
    assert (row.step_seconds is None) is (count == 6)
    assert not any("did not finish" in note for note in row_of(member("checkpoint")).notes)


def test_of_processes_that_ended_differently_the_most_frequent_reason_is_given() -> None:
    reasons = ["SIGSEGV", *["not finished after 600 s"] * 2]
    ends = {
        "status": ["crash", *["timeout"] * 2, *["ok"] * 3],
        "evidence": [*({"message": why} for why in reasons), *[{}] * 3],
    }
    row = row_of(rounds_of(member("checkpoint", 50 * MIB), **ends))
    assert "3 of 6 timed processes did not finish: not finished after 600 s" in row.notes


# What is known of a row beside its verdict


@pytest.mark.parametrize(("at_most", "flagged"), [(99 * MIB, True), (100 * MIB, False), (None, False)])
def test_a_peak_above_what_it_was_to_take_at_most_is_flagged(at_most: "int | None", flagged: bool) -> None:
    first, *rest = member("checkpoint", 100 * MIB)
    bound = Prediction(predicted_peak_bytes=98 * MIB, at_most_bytes=at_most, at_most_coverage=0.99)
    row = row_of([first.model_copy(update={"prediction": bound}), *rest])
    assert ("above_bound" in row.flags) is flagged
    assert (row.at_most_bytes, row.at_most_coverage) == (at_most, 0.99)


def test_the_most_pages_of_a_file_among_the_phases_are_noted() -> None:
    sizes = {"source": 3 * MIB, "batches": 8 * MIB, "init": None}
    phases = tuple(
        Phase(name=name, entry_bytes=0, peak_bytes=9 * MIB, exit_bytes=0, file_bytes=size)
        for name, size in sizes.items()
    )
    note = "8 MiB are pages of a file, which the kernel can take back"
    assert note in row_of(member("checkpoint", phases=phases, flags=("file_backed",))).notes
    assert note not in row_of(member("checkpoint", phases=phases)).notes


def with_children(records: list[Record], least: "int | None", most: int) -> list[Record]:
    """Give the measurements of memory child processes that took at least and at most so many MiB."""
    seen = {"child_peak_bytes": least and least * MIB, "child_peak_bound_bytes": most * MIB}
    return [each.model_copy(update=seen) if each.slot and each.slot.kind == "memory" else each for each in records]


def test_a_peak_includes_its_children_by_their_upper_bound_and_a_residual_does_not() -> None:
    row = row_of(with_children(member("checkpoint", 50 * MIB), 10, 40))
    assert (row.span_bytes, row.peak_bytes) == ((60 * MIB, 90 * MIB), 90 * MIB)
    assert (row.memory, row.residual_bytes) == ("less", -50 * MIB)
    budget = {"case": case_of("checkpoint", budget_bytes=100 * MIB)}
    (row,) = judged(with_children(member("checkpoint", 65 * MIB, **budget), 30, 40)).rows
    assert (row.status, row.peak_bytes) == ("ok", 105 * MIB), "it may have taken 95 MiB"


@pytest.mark.parametrize(("least", "shown"), [(10, "10 to 40"), (40, "40"), (None, "0 to 40")])
def test_what_child_processes_take_is_noted_as_their_bounds(least: "int | None", shown: str) -> None:
    row = row_of(with_children(member("checkpoint"), least, 40))
    assert f"its child processes take {shown} MiB of it, and at most and residual are without them" in row.notes
    there: dict[str, Any] = {"case": case_of("checkpoint", place=Place("torch", "cuda")), "peak_device_bytes": 9 * MIB}
    (row,) = judged(with_children(member("checkpoint", **there), least, 40)).rows
    assert f"its child processes take {shown} MiB of the host's memory" in row.notes
    assert row.peak_bytes == 9 * MIB


def test_what_ranks_hold_is_noted_from_the_least_to_the_most_and_together() -> None:
    ranks = tuple(Rank(peak_bytes=size * MIB) for size in (40, 30))
    row = row_of(member("checkpoint", ranks=ranks, all_ranks_bytes=70 * MIB, case=case_of("checkpoint", ranks=2)))
    assert "each of 2 ranks holds 30.0 to 40.0 MiB, together 70 MiB" in row.notes


def test_the_wait_for_a_batch_is_the_median_of_all_rounds_and_none_on_a_gpu() -> None:
    waits = Times(step_seconds=(1.0, 1.0, 1.0), fetch_seconds=(0.1, 0.2, 0.9))
    assert row_of(rounds_of(member("checkpoint"), times=waits)).fetch_seconds == 0.2
    there: dict[str, Any] = {"case": case_of("checkpoint", place=Place("torch", "cuda")), "peak_device_bytes": 9 * MIB}
    (row,) = judged(rounds_of(member("checkpoint", **there), times=waits)).rows
    assert row.fetch_seconds is None


@pytest.mark.parametrize(("uneven", "seconds"), [(False, 2.0), (True, 4.0)])
def test_where_batches_are_uneven_all_steps_count(uneven: bool, seconds: float) -> None:
    times = Times(step_seconds=(3.0, 8.0, 1.0), uneven=uneven)
    assert judged(rounds_of(member("baseline"), times=times)).rows[0].step_seconds == seconds


def test_the_rounds_that_were_planned_are_those_that_the_run_says() -> None:
    records = [record for name in ("baseline", "nothing", "checkpoint", "fused_loss") for record in member(name)]
    (unsaid,) = judge(records)
    (planned,) = judge([Record(heading=Heading(rounds=24)), *records])
    assert (unsaid.rounds, planned.rounds) == (6, 24)


@pytest.mark.parametrize(
    ("losses", "answer", "reason"),
    [
        ((6.0, 5.9, 5.8), "bit_exact", "it left everything as it was: it fits whole"),
        ((6.0, 5.9, 5.81), "approximate", "approximate it is"),
    ],
)
def test_what_left_everything_as_it_was_is_exact_where_its_losses_are(
    losses: tuple[float, ...], answer: str, reason: str
) -> None:
    row = row_of(member("blocks", answer="approximate", notes={"unchanged": "it fits whole"}, losses=losses))
    assert (row.answer, row.answer_reason) == (answer, reason)


@pytest.mark.parametrize(
    ("feeds", "notes", "answer"),
    [("other", {}, "approximate"), ("other", {"unchanged": "it fits whole"}, "bit_exact"), ("same", {}, "bit_exact")],
)
def test_other_batches_are_no_exact_answer_where_the_baseline_runs_out_of_memory(
    feeds: str, notes: dict[str, str], answer: str
) -> None:
    row = judged(out_of_memory("baseline"), member("blocks", feeds=feeds, notes=notes, batches_digest="cd")).rows[1]
    assert (row.answer, row.verdict) == (answer, "enables")


def test_what_counts_as_equal_is_no_saving_that_does_not_reach_a_user() -> None:
    members = [with_natives(member(name, peak * MIB), 100) for name, peak in (("baseline", 100), ("checkpoint", 92))]
    for control, notes in ((100, True), (106, False)):
        row = judged(*members, member("nothing", control * MIB)).rows[1]
        assert row.memory == ("less" if notes else "same")
        assert any("it saves 8% of the peak" in note for note in row.notes) is notes


def without_times(records: list[Record], rounds: Sequence[int]) -> list[Record]:
    """Let the processes of these rounds be killed."""
    killed: dict[str, Any] = {"status": "killed_unknown", "times": Times()}
    return [
        each.model_copy(update=killed) if each.slot and each.slot.kind == "time" and each.slot.round in rounds else each
        for each in records
    ]


@pytest.mark.parametrize(
    ("lost", "share"),
    [
        (range(6), "0 of 6 rounds: times are compared with the control alone"),
        (range(1, 6), "1 of 6 rounds: times are compared with the control above all"),
    ],
)
def test_a_baseline_without_its_times_is_named_and_the_control_stands_for_it(lost: range, share: str) -> None:
    baseline = without_times(member("baseline", seconds=(2.0,) * 6), lost)
    table = judged(
        baseline, member("nothing", seconds=(2.0,) * 6), member("checkpoint", seconds=(3.0,) * 6), member("x")
    )
    assert f"The baseline was timed in {share}." in table.notes
    assert table.rows[2].step_seconds == pytest.approx(3.0)
    assert not judged(member("baseline"), member("nothing"), member("checkpoint"), member("x")).notes


def test_a_claim_shows_the_step_time_that_the_table_shows() -> None:
    times = {"baseline": (1.0, 1.3, 1.1, 1.2), "nothing": (1.0, 1.2, 1.1, 1.2), "checkpoint": (1.5, 2.0, 1.6, 1.7)}
    table = judged(*(member(name, seconds=each) for name, each in times.items()), member("x", seconds=(2.2, 2.5)))
    for row in table.rows[2:]:
        assert row.step_seconds is not None
        shown = beside(row, table, "step_seconds", 0.05, row.label)
        assert shown.value == pytest.approx(row.step_seconds)


def test_rounds_count_that_went_on_without_a_row_which_today_would_not_leave() -> None:
    undecided = (1.0, 1.3, 0.9, 1.25)  # it left after four rounds, by the rules of its day
    others = [member(name, seconds=(1.0, 1.01, 0.99, 1.0) * 2) for name in ("baseline", "nothing", "fused_loss")]
    table = judged(*others, member("checkpoint", seconds=undecided))
    rounds = {row.label: row.speed.rounds for row in table.rows if row.speed is not None}
    assert rounds == {"nothing": 8, "fused_loss": 8, "checkpoint": 4}
    assert table.timed_rounds == 8
    interrupted = judged(*others, member("checkpoint", seconds=undecided[:3]))
    assert interrupted.timed_rounds == 3, "no look lies there: the fourth round was cut short"
    begun = [member(name, seconds=(1.0, 1.01, 0.99, 1.0, 1.0)) for name in ("baseline", "nothing", "fused_loss")]
    assert judged(*begun, member("checkpoint", seconds=undecided)).timed_rounds == 4, "the fifth may be cut short"


def test_tokens_per_second_follow_the_ratio_whatever_the_control_took() -> None:
    table = judged(member("baseline"), member("nothing", seconds=(1.2,) * 6), member("checkpoint", seconds=(1.1,) * 6))
    plain, control, row = table.rows
    assert (plain.step_seconds, control.step_seconds) == (pytest.approx(1.0), pytest.approx(1.2))
    assert row.step_seconds == pytest.approx(1.1), "as long as it took"
    assert table.unit_seconds == pytest.approx(1.2**0.5)


def test_a_baseline_in_several_blocks_of_a_round_was_timed_in_one() -> None:
    def in_blocks(name: str, rounds: int, blocks: int) -> list[Record]:
        made = member(name, seconds=())
        times = Times(step_seconds=(1.0, 1.0))
        slots = (
            Slot(case=made[0].case.digest(), kind="time", round=at, block=b)
            for at in range(rounds)
            for b in range(blocks)
        )  # type: ignore[union-attr]
        return [*made, *(Record(slot=slot, case=made[0].case, times=times) for slot in slots)]

    table = judged(in_blocks("baseline", 1, 4), member("nothing"), member("checkpoint"))
    assert any("The baseline was timed in 1 of " in note for note in table.notes) == (table.timed_rounds > 2)


def test_the_phase_of_a_peak_is_that_of_the_repetition_that_showed_it() -> None:
    records = member("checkpoint", (90 * MIB, 100 * MIB, 95 * MIB))
    at = next(at for at, record in enumerate(records) if record.memory.peak_host_bytes == 100 * MIB)
    memory = records[at].memory.model_copy(update={"peak_phase": "backward"})
    records[at] = records[at].model_copy(update={"memory": memory})
    row = row_of(records)
    assert (row.peak_bytes, row.peak_phase) == (100 * MIB, "backward")
    assert row.largest == records[at]
