"""Advice in words: what to use in which memory, and why nothing will do."""

from dataclasses import replace

import pytest

from harness import Place
from harness.contract import plugins
from harness.records import Applied, Case, Origin, Prediction, Record, Slot
from harness.report.advise import for_memories, text
from harness.report.plan import UNBOUNDED
from harness.report.report import Report
from harness.report.results import Results
from harness.verbs.advise import Advice, of_predictions
from harness.verbs.machine import Machine
from harness.verbs.plan import PlanRow, row_of
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Row
from harness.verdicts.pooled import Speed

GIB = 1 << 30


def predicted(
    name: str, peak_gib: "float | None", place: str = "torch/cpu", at_most_gib: "float | None" = None
) -> tuple[Case, Record]:
    case = Case(
        workload="decoder",
        shape={"tokens": 4096},
        place=Place(*place.split("/")),
        corpus="zipf",
        tokenizer="bytes",
        strategies=(Applied(name=name),) if name else (),
    )
    peak = None if peak_gib is None else int(peak_gib * GIB)
    missing = {"predicted_peak_bytes": "its data is not declared"} if peak is None else {}
    return case, Record(
        case=case,
        slot=Slot(case=case.digest(), kind="predict"),
        origin=Origin(suite="advice", commit="abc"),
        missing=missing,
        prediction=Prediction(
            predicted_peak_bytes=peak,
            at_most_bytes=None if at_most_gib is None else int(at_most_gib * GIB),
            predicted_phase="steady_step/loss",
            parameters=4 * 10**9,
        ),
    )


COMBINATIONS = [predicted("", 60), predicted("bfloat16", 30), predicted("checkpoint", 20)]


def test_each_memory_gets_the_plainest_that_fits_or_by_how_much_the_leanest_does_not() -> None:
    on_gpu = [predicted(name, peak, "torch/cuda") for name, peak in (("", 60.0), ("checkpoint", 20.0))]
    records = [record for _, record in (*COMBINATIONS, *on_gpu)]
    table = for_memories(records, {"cpu": (16 * GIB, 40 * GIB), "cuda": (80 * GIB,)}, {})
    assert table.headers == ("model", "16 GiB without a GPU", "40 GiB without a GPU", "80 GiB GPU")
    assert table.rows == (
        (
            "4.0B, 1 x 4,096 tokens",
            "nothing fits; `checkpoint` takes 20 GiB",
            "`checkpoint`: 20 GiB",
            "baseline: 60 GiB",
        ),
    )


def test_advice_says_what_it_takes_of_the_host() -> None:
    case, record = predicted("offload_activations", 20, "torch/cuda")
    host = record.prediction.model_copy(update={"predicted_host_bytes": 90 * GIB})
    rows = [
        row_of(*predicted("", 60, "torch/cuda"), Machine(device_bytes=24 * GIB)),
        row_of(case, record.model_copy(update={"prediction": host}), Machine(device_bytes=24 * GIB)),
    ]
    assert "of the host it takes 90 GiB. Nothing was measured" in text([of_predictions(rows)])
    alone = [rows[0], row_of(case, record, Machine(device_bytes=24 * GIB))]
    assert "of the host" not in text([of_predictions(alone)]).splitlines()[2]


def test_the_leanest_is_the_row_that_what_it_takes_at_most_makes_so() -> None:
    rows = [predicted("checkpoint", 11, at_most_gib=13.5), predicted("bfloat16", 12, at_most_gib=12.9)]
    table = for_memories([record for _, record in rows], {"cpu": (16 * GIB,)}, {})
    assert table.rows[0][1] == "nothing fits; `bfloat16` takes at most 12.9 GiB", "12.8 may be used"


def test_an_answer_like_the_baselines_goes_before_a_leaner_one() -> None:
    machine = Machine(host_bytes=100 * GIB)
    rows = []
    for name, peak, answer in (("bfloat16", 10, "lower_precision"), ("checkpoint", 20, "exact")):
        case, record = predicted(name, peak)
        prediction = record.prediction.model_copy(update={"declared_answer": answer})
        rows.append(row_of(case, record.model_copy(update={"prediction": prediction}), machine))
    assert of_predictions(rows).choice == "checkpoint"
    assert "the plainest that fits" in text([of_predictions(rows)])


def test_advice_says_how_sure_its_bounds_are() -> None:
    machine = Machine(host_bytes=100 * GIB)
    case, record = predicted("checkpoint", 20, at_most_gib=21)
    prediction = record.prediction.model_copy(update={"at_most_coverage": 0.985})
    sure = row_of(case, record.model_copy(update={"prediction": prediction}), machine)
    assert "- at most: with a probability of 98.5 % it takes no more" in text([of_predictions([sure])])
    assert "probability" not in text([of_predictions([row_of(*predicted("checkpoint", 20), machine)])])


@pytest.mark.parametrize("timed", [0.0, 1.0])
def test_what_is_fastest_is_said_only_of_times_that_rest_on_timed_operators(timed: float) -> None:
    machine = Machine(host_bytes=100 * GIB)
    rows = [
        replace(row_of(case, record, machine), seconds=seconds, timed=timed)
        for (case, record), seconds in zip(COMBINATIONS, (3.0, 1.0, 2.0), strict=True)
    ]
    advice = of_predictions(rows)
    assert advice.choice == ("bfloat16" if timed else "baseline")
    assert f"predicted to be the {'fastest' if timed else 'plainest'} that fits" in text([advice])


def test_the_choice_is_in_the_table_where_another_row_beats_it() -> None:
    machine = Machine(host_bytes=40 * GIB)
    rows = []
    for name, peak, seconds, answer in (
        ("", 60, 2.0, "exact"),
        ("checkpoint", 30, 3.0, "exact"),
        ("bfloat16", 20, 1.0, "lower_precision"),
    ):
        case, record = predicted(name, peak)
        prediction = record.prediction.model_copy(update={"declared_answer": answer})
        row = row_of(case, record.model_copy(update={"prediction": prediction}), machine)
        rows.append(replace(row, seconds=seconds))
    advice = of_predictions(rows)
    assert advice.choice == "checkpoint" and [row.case.label for row in advice.front] == ["bfloat16"]
    assert "| `checkpoint` " in text([advice]) and "| `bfloat16` " in text([advice])


def test_a_published_model_has_its_name_whatever_its_rows() -> None:
    decoder = plugins.load().workloads["decoder"]
    shape = decoder.shape(**decoder.presets["qwen3-4b"] | {"tokens": 512, "batch": 3}).model_dump()
    case, record = predicted("", 20)
    named = record.model_copy(update={"case": case.model_copy(update={"shape": shape})})
    ((name, _),) = for_memories([named], {"cpu": (GIB,)}, {"decoder": decoder}).rows
    assert name == "qwen3-4b (4.0B), 3 x 512 tokens"
    assert decoder.preset_of(shape | {"layers": 1}) is None


@pytest.mark.parametrize(
    ("rows", "machine", "sentence"),
    [
        (COMBINATIONS, Machine(host_bytes=10 * GIB), "Of 3 combinations, nothing fits: the leanest, checkpoint, takes"),
        (
            [predicted("", 60), predicted("checkpoint", None)],
            Machine(host_bytes=10 * GIB),
            "Of 2 combinations, nothing that can be predicted fits: the leanest, baseline, takes",
        ),
        ([predicted("", 60, "torch/cuda")], Machine(), "it is not known which fit: the memory of the GPU is not known"),
        ([predicted("", None)], Machine(host_bytes=GIB), "None of 1 combinations can be predicted: its data is not"),
    ],
    ids=["too large", "too large or unknown", "no GPU", "not predicted"],
)
def test_where_nothing_will_do_it_says_why(rows: list[tuple[Case, Record]], machine: Machine, sentence: str) -> None:
    advice = of_predictions([row_of(case, record, machine) for case, record in rows])
    answer = text([advice])
    assert sentence in answer and "measured" not in answer.replace(UNBOUNDED, "")


def test_predictions_for_advice_are_no_suite_in_the_index_of_results() -> None:
    case, record = predicted("", 60)
    run = record.model_copy(update={"slot": Slot(case=case.digest(), kind="memory")})
    results = tuple(
        Results(name, name, tuple(records)) for name, records in (("advice", [record]), ("losses", [record, run]))
    )
    places = Report(results, plugins.load())._places()
    assert "losses/README.md" in places["suites"]() and "advice/README.md" not in places["suites"]()
    assert "| model" in places["advice"]() and "losses" not in places["advice"]()


def test_where_advice_is_all_there_is_the_report_is_that_advice() -> None:
    _, record = predicted("", 60)
    report = Report((Results("advice", "advice", (record,)),), plugins.load())
    assert report.markdown().startswith("*Predicted") and "| nothing fits; baseline takes 60 GiB" in report.markdown()


def changed(record: Record, **changes: object) -> Record:
    """Return a record with another case."""
    assert record.case is not None
    return record.model_copy(update={"case": record.case.model_copy(update=changes)})


def test_a_budget_that_cases_were_predicted_with_decides_nothing_of_another_memory() -> None:
    records = [record for _, record in COMBINATIONS]
    memories = {"cpu": (16 * GIB, 40 * GIB)}
    budgeted = [changed(record, budget_bytes=25 * GIB) for record in records]
    assert for_memories(budgeted, memories, {}) == for_memories(records, memories, {})


def test_each_framework_has_a_row_where_there_are_several() -> None:
    peaks = {"torch/cpu": (60.0, 20.0), "jax/cpu": (50.0, 10.0)}
    records = [
        predicted(name, peak, place)[1]
        for place, each in peaks.items()
        for name, peak in zip(("", "checkpoint"), each, strict=True)
    ]
    assert for_memories(records, {"cpu": (16 * GIB,)}, {}).rows == (
        ("4.0B, 1 x 4,096 tokens, torch", "nothing fits; `checkpoint` takes 20 GiB"),
        ("4.0B, 1 x 4,096 tokens, jax", "`checkpoint`: 10 GiB"),
    )


def test_the_peak_is_that_of_the_row_that_was_chosen() -> None:
    large, small = (predicted("checkpoint", peak)[1] for peak in (30, 10))
    records = [large, changed(small, budget_bytes=5 * GIB)]
    assert for_memories(records, {"cpu": (16 * GIB,)}, {}).rows == (("4.0B, 1 x 4,096 tokens", "`checkpoint`: 10 GiB"),)


def test_models_of_one_size_that_differ_otherwise_have_a_row_each() -> None:
    narrow, wide = (predicted("checkpoint", peak)[1] for peak in (1, 20))
    records = [
        changed(narrow, shape={"tokens": 4096, "width": 32}),
        changed(wide, shape={"tokens": 4096, "width": 256}),
    ]
    assert for_memories(records, {"cpu": (16 * GIB,)}, {}).rows == (
        ("4.0B, 1 x 4,096 tokens, width 32", "`checkpoint`: 1 GiB"),
        ("4.0B, 1 x 4,096 tokens, width 256", "nothing fits; `checkpoint` takes 20 GiB"),
    )
    counts = {9216: "9,216", 12_300_000: "12.3M", 596_049_920: "0.6B"}
    for count, shown in counts.items():
        small = narrow.model_copy(update={"prediction": narrow.prediction.model_copy(update={"parameters": count})})
        assert for_memories([small], {"cpu": (GIB,)}, {}).rows[0][0] == f"{shown}, 1 x 4,096 tokens"


def measured(name: str, seconds: float, low: float = 1.0, high: float = 1.0, rounds: int = 6) -> Row:
    """A row that took as long; its interval lies between two multiples of the baseline, if there are several rounds."""
    error, degrees = (0.01, 15) if rounds > 1 else (None, 0)
    speed = Speed(seconds, Interval(low, high), "open", rounds, None, error, degrees) if name else None
    ratio = 0.5 if name else 1.0
    case, _ = predicted(name, 1)
    return Row(case, "ok", peak_bytes=GIB, peak_ratio=ratio, step_seconds=seconds, speed=speed, answer="bit_exact")


def advice_of(*rows: Row) -> Advice:
    """Return advice to use the first of some rows; one more combination was predicted."""
    predictions = [*COMBINATIONS, predicted("cut_loss", 20)]
    advice = of_predictions([row_of(case, record, Machine(host_bytes=100 * GIB)) for case, record in predictions])
    chosen = next(row for row in advice.predicted if row.case.label == rows[0].label)
    return replace(advice, rows=rows, usable=rows, chosen=chosen)


def test_the_fastest_that_was_measured_is_named_with_its_interval_and_the_next_with_its_own() -> None:
    rows = measured("checkpoint", 0.8, 0.78, 0.82), measured("bfloat16", 0.9, 0.88, 0.92), measured("", 1.0)
    sentence = text([advice_of(*rows)])
    assert (
        "Use **checkpoint**: of the 3 that were measured of 4 combinations it was the fastest that fits, " in sentence
    )
    assert "; against the baseline 0.50 x the memory at 0.78 to 0.82 x the time. Its answer is bit_exact." in sentence
    assert "Next best: bfloat16, 0.50 x the memory at 0.88 to 0.92 x the time." in sentence


@pytest.mark.parametrize(
    "rows",
    [
        (measured("checkpoint", 0.8, 0.7, 0.9), measured("bfloat16", 0.9, 0.85, 0.95), measured("", 1.0)),
        (measured("checkpoint", 0.9, 0.8, 1.1), measured("", 1.0)),
        (measured("", 1.0), measured("checkpoint", 1.1, 0.9, 1.3)),
    ],
    ids=["a row", "the baseline", "the baseline is the first"],
)
def test_what_the_intervals_do_not_tell_apart_is_among_the_fastest(rows: tuple[Row, ...]) -> None:
    assert f"of the {len(rows)} that were measured of 4 combinations it was among the fastest that fit, " in text(
        [advice_of(*rows)]
    )


def test_of_a_budget_and_a_memory_that_is_named_the_narrower_is_what_the_fastest_fits() -> None:
    row = measured("checkpoint", 0.8)
    within = replace(row, case=row.case.model_copy(update={"budget_bytes": 90 * GIB}))
    assert "it was the fastest that fits 80 GiB, " in text([advice_of(within)]), "of 100 GiB a case may take as much"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("oom_budget", "; the baseline does not fit."),
        ("skipped_guard", "; the baseline does not fit."),
        ("timeout", "; the baseline did not finish: timeout."),
        ("crash", "; the baseline did not finish: crash."),
    ],
)
def test_a_baseline_that_ended_otherwise_is_not_said_to_need_too_much(status: str, said: str) -> None:
    row, plain = measured("checkpoint", 0.8), replace(measured("", 1.0), status=status, peak_bytes=None)
    assert said in text([replace(advice_of(row), rows=(row, plain))])


def test_a_range_that_was_seen_is_no_interval() -> None:
    rows = measured("checkpoint", 0.8, 0.7, 0.75, 1), measured("bfloat16", 0.9, 0.8, 0.85, 1), measured("", 1.0)
    sentence = text([advice_of(*rows)])
    assert "it was one that fits (so few rounds do not say which is the fastest)" in sentence
    assert sentence.count("0.50 x the memory at a time that 1 round cannot tell") == 1
    assert "0.80 x" not in sentence and "Next best" not in sentence


def test_where_no_run_gave_a_right_answer_no_budget_is_named_that_nobody_set() -> None:
    row = replace(measured("checkpoint", 0.8), status="crash", peak_bytes=None, step_seconds=None)
    advice = replace(advice_of(measured("", 1.0)), rows=(row,), usable=(), chosen=None)
    shown = text([advice])
    assert "none that was measured gave a right answer within what it may use." in shown and "budget" not in shown


def test_what_each_member_of_the_choice_saves_is_what_it_would_take_without_it() -> None:
    def row(peak_gib: int, seconds: float, *names: str) -> PlanRow:
        case, record = predicted("", peak_gib)
        case = case.model_copy(update={"strategies": tuple(Applied(name=name) for name in names)})
        return replace(row_of(case, record, Machine(host_bytes=10 * GIB)), seconds=seconds, timed=1.0)

    rows = [
        row(40, 1.0),
        row(20, 1.2, "checkpoint"),
        row(12, 1.0, "fused_loss"),
        row(4, 1.5, "checkpoint", "fused_loss"),
    ]
    shown = text([of_predictions(rows)])
    assert (
        "predicted to be the fastest that fits 8 GiB, with a peak of 4 GiB, 0.10 x the baseline's, and 1.50 x its time."
        in shown
    )
    saved = "checkpoint saves 8 GiB, 1.50 x the time; fused_loss saves 16 GiB, 1.25 x the time"
    assert f"\nAs predicted, {saved}.\n" in shown


def test_strategies_without_a_prediction_are_named_with_the_reason() -> None:
    rows = [predicted("", 60), predicted("checkpoint", 30), predicted("bfloat16", None), predicted("cut_loss", None)]
    shown = text([of_predictions([row_of(*each, Machine(host_bytes=100 * GIB)) for each in rows])])
    assert "\n- no prediction of bfloat16, cut_loss: its data is not declared\n" in shown
