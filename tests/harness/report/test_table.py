"""A table says what was judged, rounds it, and lets no text of a record become markup or a terminal's command."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import Place
from harness.contract import plugins
from harness.records import Applied, Case, Memory, Origin, Prediction, Record, Slot
from harness.records.case import Claim
from harness.report.answer import last_lines
from harness.report.table import FETCH, HEADERS, HOST, NATIVE, SPARSE, markdown
from harness.report.text import escaped
from harness.verdicts.claims import Answer
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import Speed

MIB = 1 << 20
CASE = Case(
    workload="decoder",
    shape={"tokens": 2048, "layers": 6, "width": 512, "vocabulary": 32_000, "batch": 1, "feed": "gelu"},
    place="torch/cpu",
    corpus="zipf",
    tokenizer="bytes",
)
LOADED = plugins.load()
UNKNOWN = plugins.Plugins(LOADED.manager, {}, {})


SLOWER = Speed(1.25, Interval(1.2, 1.3), "slower", 6, None, 0.01, 15)


def row(*names: str, **changes: Any) -> Row:
    """Make a row of the strategies named, measured and right unless told otherwise."""
    given: dict[str, Any] = {
        "case": CASE.model_copy(update={"strategies": tuple(Applied(name=name) for name in names)}),
        "status": "ok",
        "peak_bytes": 512 * MIB + 700_000,
        "peak_ratio": 0.49951,
        "peak_phase": "steady_step/loss",
        "predicted_bytes": 500 * MIB,
        "residual_bytes": 12 * MIB,
        "residual_ratio": 0.02534,
        "floor_bytes": 100 * MIB,
        "floor_ratio": 5.1267,
        "step_seconds": 0.125,
        "speed": SLOWER,
        "memory": "less",
        "answer": "bit_exact",
        "answer_reason": "",
        "loss_difference": 0.0,
        "verdict": "trades",
    }
    return Row(**(given | changes))


BASELINE = row(memory=None, speed=None, verdict="baseline", peak_ratio=1.0)


def text_of(*rows: Row, notes: "tuple[str, ...]" = (), title: str = "") -> str:
    return markdown([Comparison(rows[0].case, rows, notes)], LOADED, title)


def cells_of(text: str) -> list[dict[str, str]]:
    """Read the rows of a table as a reader of GitHub's markdown does: a cell ends at a bar without a backslash."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    due = [name for name in HEADERS if name not in (FETCH, *SPARSE) or re.search(rf"\| +{name} +\|", lines[0])]
    assert all(len(cells) == len(due) for cells in table), "another number of cells"
    assert all(set(cell) <= set(":-") for cell in table[1])
    return [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]


def test_a_row_holds_its_figures_rounded() -> None:
    baseline, checkpoint = cells_of(text_of(BASELINE, row("checkpoint")))
    assert checkpoint == {
        "strategy": "`checkpoint`",
        "peak MiB": "513",
        "memory": "0.50 x, less",
        "predicted": "500",
        "residual": "+2.5%",
        "x floor": "5.1",
        "peak in": "loss",
        "tokens/s": "16,384",
        "time": "1.25 x (1.20-1.30), slower",
        "answer": "bit_exact",
        "verdict": "trades",
    }
    assert (baseline["strategy"], baseline["memory"], baseline["time"]) == ("baseline", "", "")


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0.0"), (1, "0.0"), (99 * MIB, "99.0"), (1_234_567, "1.2"), (100 * MIB, "100"), (5000 * MIB, "5,000")],
)
def test_sizes_are_rounded_to_what_they_are_good_for(size: int, shown: str) -> None:
    (cells,) = cells_of(text_of(row("checkpoint", peak_bytes=size)))
    assert cells["peak MiB"] == shown


def test_what_is_unknown_is_empty_and_never_zero() -> None:
    unknown = dict.fromkeys(
        ["peak_bytes", "peak_ratio", "peak_phase", "predicted_bytes", "residual_bytes", "residual_ratio", "floor_bytes",
         "floor_ratio", "step_seconds", "speed", "answer"]
    )  # fmt: skip
    (cells,) = cells_of(text_of(row("checkpoint", **unknown)))
    assert {cell for name, cell in cells.items() if name not in ("strategy", "verdict")} == {""}


@pytest.mark.parametrize(("count", "words"), [(1, "1 round"), (2, "2 rounds")])
def test_a_range_that_was_seen_is_no_time(count: int, words: str) -> None:
    """Two rounds beside other work gave 6.16 x for what takes 1.03 x: a middle of a range says nothing."""
    seen = Speed(6.16, Interval(0.9, 13.0), "open", count)
    text = text_of(BASELINE, row("checkpoint", speed=seen, memory="less", peak_ratio=0.47))
    assert f"0.47 x the memory at a time that {words} cannot tell" in text
    assert "6.16 x the time" not in text


def test_the_heading_names_what_is_compared() -> None:
    budget = CASE.model_copy(update={"budget_bytes": 8 << 30})
    text = text_of(replace(BASELINE, case=budget), title="What fits")
    first, second = [line for line in text.splitlines() if line.startswith("#")]
    assert first == "# What fits"
    assert second.startswith("## decoder on torch/cpu, 2,048 tokens, layers 6, width 512, vocabulary 32,000, batch 1")
    assert second.endswith("budget 8,192 MiB")


def test_headings_that_would_be_equal_name_the_sizes_in_which_they_differ() -> None:
    tables = []
    for heads in (4, 8):
        size = {"shape": CASE.shape | {"heads": heads}}
        rows = tuple(replace(each, case=each.case.model_copy(update=size)) for each in (BASELINE, row("checkpoint")))
        tables.append(Comparison(rows[0].case, rows))
    heads = [line for line in markdown(tables, LOADED).splitlines() if line.startswith("#")]
    assert [line.partition(", zipf")[2] for line in heads] == [", heads 4", ", heads 8"]
    lines = last_lines(tables, {}).splitlines()
    assert ["heads 4:" in lines[0], "heads 8:" in lines[1]] == [True, True]


def test_the_tables_follow_each_other_and_end_with_one_line_end() -> None:
    other = CASE.model_copy(update={"place": Place("jax", "cpu")})
    text = markdown([Comparison(CASE, (BASELINE,)), Comparison(other, (replace(BASELINE, case=other),))], UNKNOWN)
    assert [line for line in text.splitlines() if line.startswith("## ")][1].startswith("## decoder on jax/cpu")
    assert text.endswith("|\n")
    assert not text.endswith("\n\n")
    assert [cells["tokens/s"] for cells in cells_of_each(text)] == ["", ""]


def cells_of_each(text: str) -> list[dict[str, str]]:
    return [cells for piece in text.split("## ")[1:] for cells in cells_of(piece)]


@pytest.mark.parametrize(
    ("status", "budget", "shown"),
    [
        ("oom_budget", 512 * MIB, "> 512"),
        ("oom_budget", 8 << 30, "> 8,192"),
        ("oom_budget", None, "oom_budget"),
        ("oom_host", 512 * MIB, "oom_host"),
        ("timeout", None, "timeout"),
        ("skipped_guard", None, "skipped_guard"),
        ("unsupported", None, "unsupported"),
    ],
)
def test_a_failure_is_a_row_and_not_a_gap(status: str, budget: "int | None", shown: str) -> None:
    case = CASE.model_copy(update={"strategies": (Applied(name="checkpoint"),), "budget_bytes": budget})
    failed = row(
        case=case,
        status=status,
        peak_bytes=400 * MIB,
        peak_ratio=None,
        speed=None,
        verdict="fails",
        reasons=("no memory left in steady_step/loss",),
    )
    text = text_of(replace(BASELINE, case=CASE.model_copy(update={"budget_bytes": budget})), failed)
    cells = cells_of(text)[1]
    assert (cells["peak MiB"], cells["verdict"], cells["peak in"]) == (shown, "fails", "loss")
    assert "\n- checkpoint: no memory left in steady_step/loss\n" in text


def test_on_a_device_stands_what_the_host_holds_beside_it() -> None:
    on_gpu = {"case": CASE.model_copy(update={"place": Place("torch", "cuda")})}
    peaks = tuple(Record(memory=Memory(peak_host_bytes=size * MIB)) for size in (1041, 1042))
    text = text_of(replace(BASELINE, **on_gpu), replace(row("offload", records=(*peaks, Record())), **on_gpu))
    assert [cells[HOST] for cells in cells_of(text)] == ["", "1,042"]
    assert HOST not in text_of(replace(BASELINE, records=peaks)), "on a CPU that is the peak"
    moved = Record(prediction=Prediction(predicted_host_bytes=900 * MIB))
    away = {"status": "unsupported", "verdict": "untested", "reasons": ("no GPU",)}
    offload = replace(row("offload", prediction=moved, **away), **on_gpu)
    lines = [line for line in text_of(replace(BASELINE, **away, **on_gpu), offload).splitlines() if line[:1] == "|"]
    head, _, *cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [each[head.index(HOST)] for each in cells] == ["", "900"]


def test_a_place_that_is_missing_is_said_once() -> None:
    missing = {"status": "unsupported", "verdict": "untested", "reasons": ("this machine has no NVIDIA GPU",)}
    text = text_of(replace(BASELINE, **missing), row("checkpoint", **missing))
    assert text.count("this machine has no NVIDIA GPU") == 1
    assert "Untested: this machine has no NVIDIA GPU." in text
    assert "predicted MiB" in text and "tokens/s" not in text


def test_ties_of_the_peak_are_counted() -> None:
    phases = "steady_step/loss, first_step/loss, steady_step/backward, batches"
    (cells,) = cells_of(text_of(row("checkpoint", peak_phase=phases)))
    assert cells["peak in"] == "loss (+2)"


def speed(word: str, more_rounds: "int | None" = None, rounds: int = 4, inferred: bool = True) -> Speed:
    return Speed(1.041, Interval(0.97, 1.1), word, rounds, more_rounds, 0.02 if inferred else None, 9 * inferred)


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        (speed("open", 12), "1.04 x (0.97-1.10), open: about 12 more rounds"),
        (speed("open", 1), "1.04 x (0.97-1.10), open: about 1 more round"),
        (speed("open"), "1.04 x (0.97-1.10), open"),
        (speed("within 5 %", 7), "1.04 x (0.97-1.10), within 5 %"),
        (speed("at most 5 % slower", 3), "1.04 x (0.97-1.10), at most 5 % slower"),
        (speed("at most 5 % faster", 3), "1.04 x (0.97-1.10), at most 5 % faster: about 3 more rounds"),
        (speed("open", rounds=1, inferred=False), "1.04 x, 1 round: open"),
        (speed("open", rounds=3, inferred=False), "1.04 x (0.97-1.10), 3 rounds: open"),
    ],
)
def test_a_time_is_shown_with_its_interval_its_word_and_what_would_decide_it(seen: Speed, shown: str) -> None:
    (cells,) = cells_of(text_of(row("checkpoint", speed=seen)))
    assert cells["time"] == shown


@pytest.mark.parametrize(
    ("native", "ratio", "shown"),
    [
        ((300 * MIB, 310 * MIB), 0.61, "300-310, 0.61 x"),
        ((300 * MIB, 300 * MIB + 9), 0.61, "300, 0.61 x"),
        ((300 * MIB, 310 * MIB), None, "300-310"),
    ],
)
def test_the_peak_of_the_allocator_as_it_is_stands_beside_the_pinned_one(
    native: tuple[int, int], ratio: "float | None", shown: str
) -> None:
    (cells,) = cells_of(text_of(row("checkpoint", native_bytes=native, native_ratio=ratio)))
    assert cells[NATIVE] == shown
    assert NATIVE not in text_of(row("checkpoint"))


@pytest.mark.parametrize(
    ("peak", "predicted", "shown"),
    [(20, 10, "+10.0 MiB"), (10, 31, "-21.0 MiB"), (40, 20, "+100.0%"), (20, 32, "-37.5%")],
)
def test_residuals_of_small_peaks_are_in_mib(peak: int, predicted: int, shown: str) -> None:
    small = row(
        "checkpoint",
        peak_bytes=peak * MIB,
        predicted_bytes=predicted * MIB,
        residual_bytes=(peak - predicted) * MIB,
        residual_ratio=(peak - predicted) / predicted,
    )
    (cells,) = cells_of(text_of(small))
    assert cells["residual"] == shown


def test_a_memory_that_is_not_to_be_believed_has_its_ratio_and_no_word() -> None:
    (cells,) = cells_of(text_of(row("checkpoint", memory=None, verdict="withheld", reasons=("no verdict: why",))))
    assert (cells["memory"], cells["verdict"]) == ("0.50 x", "withheld")


@pytest.mark.parametrize("answer", ["diverged", "invalid"])
def test_a_wrong_answer_is_shown_with_its_reason(answer: str) -> None:
    wrong = row("checkpoint", answer=answer, answer_reason="E_s is 9 times E_b", verdict="wrong")
    text = text_of(BASELINE, wrong)
    assert cells_of(text)[1]["answer"] == answer
    assert f"- checkpoint: {answer}: E_s is 9 times E_b" in text


def test_an_answer_that_is_missing_is_explained() -> None:
    text = text_of(BASELINE, row("checkpoint", answer=None, answer_reason="ended by SIGSEGV"))
    assert cells_of(text)[1]["answer"] == ""
    assert "ended by SIGSEGV" in text


def test_flags_reasons_and_notes_stand_below() -> None:
    text = text_of(BASELINE, row("checkpoint", flags=("noisy", "prediction_off"), reasons=("why",)), notes=("A note.",))
    below = text.rpartition("|")[2]
    assert "A note." in below
    assert "- checkpoint: why; flags: noisy, prediction_off" in below


# Text of others

HOSTILE = "a | b\n|c|\r\x1b[31mred\x07`code` <script>x</script> [l](http://h) *b* \\| \u202e\u2028\x85\x9b2J"


@pytest.mark.parametrize("field", ["label", "knob", "reason", "answer_reason", "phase", "answer", "flag", "title"])
def test_hostile_text_stays_text(field: str) -> None:
    case = BASELINE.case
    changes: dict[str, Any] = {
        "label": {"case": case.model_copy(update={"strategies": (Applied(name=HOSTILE),)})},
        "knob": {"case": case.model_copy(update={"strategies": (Applied(name="a", knobs={HOSTILE: HOSTILE}),)})},
        "reason": {"reasons": (HOSTILE, "x")},
        "answer_reason": {"answer": "diverged", "answer_reason": HOSTILE},
        "phase": {"peak_phase": HOSTILE},
        "answer": {"answer": HOSTILE},
        "flag": {"flags": (HOSTILE,)},
        "title": {},
    }[field]
    plain = text_of(BASELINE, row("checkpoint", reasons=("r",)), title="t")
    title = HOSTILE if field == "title" else "t"
    text = text_of(BASELINE, row("checkpoint", **{"reasons": ("r",), **changes}), title=title)
    assert len(cells_of(text)) == 2
    assert len(text.splitlines()) == len(plain.splitlines()), "another line"
    assert all(line.isprintable() for line in text.split("\n"))
    assert "<" not in text
    assert not re.search(r"(?<!\\)\[", text), "a link"


def test_a_hostile_heading_and_an_untested_reason_stay_text() -> None:
    case = CASE.model_copy(update={"workload": HOSTILE, "place": HOSTILE})
    missing = replace(BASELINE, case=case, status="unsupported", reasons=(HOSTILE,), predicted_bytes=None)
    text = text_of(missing)
    assert len(text.splitlines()) == 3
    assert all(line.isprintable() for line in text.split("\n"))
    assert "<" not in text


@given(st.text(max_size=30))
def test_escaped_text_is_one_printable_cell(text: str) -> None:
    told = escaped(text)
    assert told.isprintable()
    assert not re.search(r"(?<!\\)(\\\\)*[|`*\[\]]", told), "a sign that markdown obeys"
    assert "<" not in told and ">" not in told


@given(st.text(st.characters(exclude_characters="\\`*<>|[]", exclude_categories=["C", "Z"])))
def test_plain_text_is_left_as_it_is(text: str) -> None:
    assert escaped(text) == text


def test_the_wait_for_batches_is_a_column_where_it_matters() -> None:
    slow = row("checkpoint", step_seconds=0.1, fetch_seconds=0.0123)
    cells = cells_of(text_of(row("nothing", step_seconds=0.1, fetch_seconds=None), slow))
    assert [one[FETCH] for one in cells] == ["", "12.30"]
    quick = row("checkpoint", step_seconds=0.1, fetch_seconds=0.0019)
    assert FETCH not in cells_of(text_of(quick))[0]


def test_what_the_parts_noted_stands_below_the_table_once() -> None:
    text = text_of(
        row("nothing", notes=("drawn from a|b",)), row("checkpoint", notes=("drawn from a|b", "chose <mapped>"))
    )
    assert "- all: drawn from a\\|b" in text and text.count("drawn from") == 1
    assert "- checkpoint: chose &lt;mapped&gt;" in text


def test_a_combination_says_what_each_member_contributes() -> None:
    rows = [
        BASELINE,
        row("checkpoint", peak_bytes=300 * MIB),
        row("fused_loss", peak_bytes=250 * MIB),
        row("checkpoint", "fused_loss", peak_bytes=200 * MIB),
        row("checkpoint", "bfloat16", peak_bytes=100 * MIB),
    ]
    text = text_of(*rows)
    assert "- checkpoint + fused_loss: without checkpoint: 50.0 MiB more; without fused_loss: 100 MiB more" in text
    assert "without bfloat16" not in text, "there is no row of bfloat16 alone"
    metered = (Record(memory=Memory(resolution_bytes=MIB)),)
    rows[3] = row("checkpoint", "fused_loss", peak_bytes=250 * MIB - 1, records=metered)
    assert "without checkpoint: as much; without fused_loss: 50.0 MiB more" in text_of(*rows), "the meter cannot tell"


def test_a_combination_on_ranks_is_held_against_its_members_on_as_many() -> None:
    def on(ranks: int, *names: str, peak: int, **changes: Any) -> Row:
        made = row(*names, peak_bytes=peak * MIB, **changes)
        return replace(made, case=made.case.model_copy(update={"ranks": ranks}))

    text = text_of(
        BASELINE,
        on(1, "checkpoint", peak=300),
        on(2, "fsdp", peak=400),
        on(4, "fsdp", peak=200),
        on(2, "fsdp", "checkpoint", peak=250),
        on(4, "fsdp", "checkpoint", peak=150),
        on(2, "tensor_parallel", peak=500),
        on(4, "tensor_parallel", peak=0, status="crash"),
        on(2, "fsdp", "tensor_parallel", peak=100),
        on(4, "fsdp", "tensor_parallel", peak=90),
    )
    lines = [line for line in text.splitlines() if ": without " in line]
    assert lines == [
        "- fsdp + checkpoint on 2 ranks: without fsdp: 50.0 MiB more; without checkpoint: 150 MiB more",
        "- fsdp + checkpoint on 4 ranks: without fsdp: 150 MiB more; without checkpoint: 50.0 MiB more",
        "- fsdp + tensor_parallel on 2 ranks: without fsdp: 400 MiB more; without tensor_parallel: 300 MiB more",
    ], "tensor_parallel did not run on 4 ranks"


def test_a_place_that_is_missing_says_of_which_rows_there_is_no_prediction_and_why() -> None:
    away = {"status": "unsupported", "verdict": "untested", "reasons": ("no GPU",)}
    unknown = away | {"predicted_bytes": None, "prediction": Record(missing={"predicted_peak_bytes": "it\nbranches"})}
    text = text_of(replace(BASELINE, **away), row("mapped", **unknown), row("branching", **unknown))
    assert text.endswith("\n\n- mapped, branching: no prediction: it branches\n")
    assert text_of(row("mapped", **unknown)).endswith("Untested: no GPU.\n\n- all: no prediction: it branches\n")
    assert "no prediction" not in text_of(replace(BASELINE, **away))


def test_a_bound_stands_beside_the_prediction_with_its_probability() -> None:
    bounded = row("checkpoint", at_most_bytes=530 * MIB, at_most_coverage=0.99)
    text = text_of(BASELINE, bounded)
    baseline, checkpoint = cells_of(text)
    assert (checkpoint["predicted"], checkpoint["at most"], baseline["at most"]) == ("500", "530", "")
    assert "- at most: with a probability of 99 % it takes no more" in text
    assert "at most" not in text_of(BASELINE), "nor a column without figures"
    surer = row("bfloat16", at_most_bytes=530 * MIB, at_most_coverage=395 / 396)
    assert "- at most: with a probability of 99 % to 99.7 % it takes no more" in text_of(BASELINE, bounded, surer)


def test_where_others_of_the_suite_are_of_another_machine_tables_and_claims_name_theirs() -> None:
    record = Record(slot=Slot(case="c", kind="memory"), origin=Origin(machine={"name": "m"}))
    table = Comparison(CASE, (replace(BASELINE, records=(record,)),))
    answer = Answer(Claim(id="A1", says="it is", that="peak(baseline) > 0"), "verified", "it is")
    text = markdown([table], LOADED, answers=[answer], run="")
    assert "\n\nMeasured on m.\n\n" in text and "## Claims, measured on m\n" in text
    alone = markdown([table], LOADED, answers=[answer])
    assert "## Claims\n" in alone and "Measured on" not in alone


def test_what_the_only_measured_row_noted_is_not_said_of_all() -> None:
    out = replace(BASELINE, status="oom_budget", verdict="fails", speed=None)
    text = text_of(out, row("checkpoint", notes=("chose 9 of 12",), flags=("file_backed",)))
    assert "- checkpoint: chose 9 of 12; flags: file_backed" in text and "- all: " not in text
