"""Rows as flat figures, and the pictures made of them."""

import csv
import io
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.records import Applied, Case, Memory, Origin, Phase, Rank, Record, Slot, Times
from harness.records.place import Place
from harness.report import charts, export, formats
from harness.report.charts import PicturesError
from harness.report.charts.style import HEIGHT, WIDTH, ticks
from harness.report.export import Figures
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import Speed

pytestmark = pytest.mark.usefixtures("pictures")
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[3]


def pictures_of(rows: Sequence[Figures]) -> dict[str, Any]:
    """Draw every chart that rows of one suite have figures for, which altair checks."""
    return {name: draw() for name, draw in charts.drawings(rows)}


def row(*names: str, tokens: int = 64, peak: int = 100 * MIB, seconds: float = 1.0, **changes: object) -> Row:
    case = Case(
        workload="decoder",
        shape={"tokens": tokens, "layers": 2},
        place="torch/cpu",
        corpus="x",
        tokenizer="bytes",
        strategies=tuple(Applied(name=name) for name in names),
        budget_bytes=1 << 30,
    )
    phases = tuple(
        Phase(name=name, entry_bytes=0, peak_bytes=peak, exit_bytes=0)
        for name in ("init", "steady_step/forward", "steady_step/backward")
    )
    given = {
        "status": "ok",
        "peak_bytes": peak,
        "peak_phase": "steady_step/backward",
        "predicted_bytes": peak - MIB,
        "step_seconds": seconds,
        "speed": Speed(seconds, Interval(seconds * 0.9, seconds * 1.1), "open", 4, 9, 0.02, 9) if names else None,
        "answer": "bit_exact",
        "verdict": "wins" if names else "baseline",
        "records": (Record(memory=Memory(phases=phases), origin=Origin(machine={"name": "m"}, commit="c")),),
    }
    return Row(case, **{**given, **changes})  # type: ignore[arg-type]


def rows_of(*rows: Row) -> list[export.Figures]:
    return export.of_tables("mine", [Comparison(rows[0].case, rows)], {rows[0].case.comparison_key: 64})


def test_every_figure_is_a_number_in_json():
    (baseline, other) = json.loads(export.as_json(rows_of(row(), row("checkpoint", peak=50 * MIB, seconds=2.0))))
    assert baseline["strategy"] == "baseline" and baseline["time_ratio"] is None
    assert (other["suite"], other["place"], other["strategy"]) == ("mine", "torch/cpu", "checkpoint")
    assert (other["peak_bytes"], other["tokens_per_second"], other["time_ratio"]) == (50 * MIB, 32.0, 2.0)
    assert (other["time_ratio_low"], other["time_ratio_high"]) == pytest.approx((1.8, 2.2))
    assert (other["time"], other["rounds"], other["more_rounds"]) == ("open", 4, 9)
    assert other["shape"]["tokens"] == 64 and other["phases"]["init"] == 50 * MIB
    assert (other["machine"], other["commit"]) == ("m", "c")
    wrong = row("a", answer="invalid", answer_reason="the gradient of embed holds NaN")
    assert json.loads(export.as_json(rows_of(wrong)))[0]["answer_reason"] == "the gradient of embed holds NaN"


def test_what_a_row_had_taken_when_it_failed_is_no_peak_of_it():
    failed, ran = rows_of(row(status="oom_budget"), row("a"))
    assert (failed["peak_bytes"], ran["peak_bytes"]) == (None, 100 * MIB)


def test_a_spreadsheet_reads_a_line_for_each_row_and_no_formula():
    text = export.as_csv(rows_of(row(), row("checkpoint", reasons=('=cmd("x"), "quoted"\nand more',))))
    first, second = csv.DictReader(io.StringIO(text))
    assert first["strategy"] == "baseline" and first["time_ratio"] == ""
    assert float(second["peak_bytes"]) == 100 * MIB
    assert second["reasons"] == '\'=cmd("x"), "quoted"\nand more'
    assert "\x1b" not in export.as_csv(rows_of(row(reasons=("\x1b[2J",)))), "a terminal obeys nothing of it"


def test_a_spreadsheet_has_json_where_figures_are_nested():
    (line,) = csv.DictReader(io.StringIO(export.as_csv(rows_of(row()))))
    assert json.loads(line["shape"]) == {"tokens": 64, "layers": 2}
    assert json.loads(line["phases"])["init"] == 100 * MIB
    assert json.loads(line["composition"]) == {"backward": 100 * MIB}
    assert json.loads(line["rank_peaks"]) == []


def test_phases_of_the_host_say_nothing_of_a_peak_on_a_gpu():
    case = row().case.model_copy(update={"place": Place.parse("torch/cuda")})
    figures = rows_of(replace(row(peak=4126 * MIB), case=case, records=row(peak=18 * MIB).records))
    assert (figures[0]["phases"], figures[0]["composition"]) == ({}, {})
    assert figures[0]["peak_phase"] == "steady_step/backward"
    assert pictures_of(figures) == {}


ONE_ROUND = row("once", seconds=1.19, peak_ratio=0.9, speed=Speed(1.19, Interval(1.19, 1.19), "open", 1))


def test_the_range_of_too_few_rounds_is_no_interval():
    figures = rows_of(row(), row("a", peak_ratio=0.8), ONE_ROUND)
    once = figures[-1]
    assert (once["time_ratio"], once["time_ratio_low"], once["time_ratio_high"]) == (1.19, None, None)
    assert (once["rounds"], once["time"]) == (1, "open")
    services = json.loads(formats.bencher(figures))
    bounds = {name.rpartition(" / ")[2]: set(metrics["latency"]) for name, metrics in services.items()}
    everything = {"value", "lower_value", "upper_value"}
    assert bounds == {"baseline": {"value"}, "a": everything, "once": {"value"}}
    steps = [entry for entry in json.loads(formats.benchmark_action(figures)) if entry["unit"] == "ms"]
    assert [entry.get("range") for entry in steps] == [None, "± 100", None]
    spec = charts.tradeoff(figures).to_dict()
    assert [bar["strategy"] for bar in marks(spec, "rule")] == ["a"]
    assert {"once", "a", "baseline"} == {point["strategy"] for point in marks(spec, "point")}


def timed(*names: str, seconds: tuple[float, ...]) -> Row:
    """Return a row whose rounds took a step time each."""
    records = tuple(
        Record(slot=Slot(case="x", kind="time", round=number), times=Times(step_seconds=(each,)))
        for number, each in enumerate(seconds)
    )
    return row(*names, records=records)


def test_rounds_are_divided_by_what_the_ratio_is():
    """By the mean of baseline and control on the ln scale, of which one may be missing; the control by the baseline."""
    figures = rows_of(
        timed(seconds=(2.0, 2.0)), timed("nothing", seconds=(8.0,)), timed("a", seconds=(4.0, 4.0)),
    )  # fmt: skip
    assert [each["round_ratios"] for each in figures] == [[], pytest.approx([4.0]), pytest.approx([1.0, 2.0])]


def test_comparisons_whose_sizes_or_machines_differ_have_names_of_their_own():
    def sized(heads: int, machine: str) -> Comparison:
        shape = {"tokens": 64, "layers": 2, "heads": heads, "changes": {"hidden_size": 8 * heads}, "tied": False}
        (record,) = row().records
        origin = record.origin.model_copy(update={"machine": {"name": machine}})
        record = record.model_copy(update={"slot": Slot(case="x", kind="memory"), "origin": origin})
        rows = tuple(
            replace(each, case=each.case.model_copy(update={"shape": shape}), records=(record,))
            for each in (row(), row("checkpoint", peak_ratio=0.5))
        )
        return Comparison(rows[0].case, rows)

    tables = [sized(4, "m"), sized(8, "m"), sized(4, "n")]
    figures = export.of_tables("mine", tables, {})
    here = "decoder on torch/cpu, 64 tokens, layers 2, bytes of x, budget 1,024 MiB"
    assert list(dict.fromkeys(figure["comparison"] for figure in figures)) == [
        f"{here}, heads 4, changes hidden size 32, on m",
        f"{here}, heads 8, changes hidden size 64",
        f"{here}, heads 4, changes hidden size 32, on n",
    ]
    assert len(json.loads(formats.bencher(figures))) == 6
    assert len({entry["name"] for entry in json.loads(formats.benchmark_action(figures))}) == 12
    assert {f"tradeoff-{number}" for number in (1, 2, 3)} <= pictures_of(figures).keys()
    assert {figure["comparison"] for figure in export.of_tables("mine", tables[:1], {})} == {here}


def drawn(*rows: Row, chart: str) -> dict[str, Any]:
    """Draw one chart of a comparison; return its specification."""
    return pictures_of(rows_of(*rows))[chart].to_dict()


def marks(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Collect the values of all layers of one kind."""
    layers = [
        layer
        for layer in spec["layer"]
        if (layer["mark"] if isinstance(layer["mark"], str) else layer["mark"]["type"]) == kind
    ]
    return [value for layer in layers for value in layer.get("data", {}).get("values", [])]


FRONT = (
    row(peak=100 * MIB),
    row("a", peak=50 * MIB, seconds=2.0, peak_ratio=0.5),
    row("b", peak=60 * MIB, seconds=3.0, peak_ratio=0.6),
    row("c", peak=200 * MIB, seconds=0.5, peak_ratio=2.0, answer="approximate"),
    row("d", peak=10 * MIB, seconds=0.5, peak_ratio=0.1, answer="diverged"),
)


def test_the_front_holds_what_nothing_beats_in_both():
    points = marks(drawn(*FRONT, chart="tradeoff-1"), "point")
    kinds = {point["strategy"]: point["kind"] for point in points}
    exact, other, beaten = "best, answers as before", "best, answers less exactly", "beaten in both, as estimated"
    assert kinds == {"a": exact, "baseline": exact, "c": other, "b": beaten}, "a wrong answer is nowhere"


def test_a_row_whose_answer_was_not_compared_is_on_no_front():
    unknown = row("unknown", peak=10 * MIB, seconds=0.5, peak_ratio=0.1, answer=None)
    points = marks(drawn(*FRONT, unknown, chart="tradeoff-1"), "point")
    assert {point["strategy"] for point in points} == {"a", "b", "c", "baseline"}


def test_what_cannot_be_held_against_others_is_on_no_front():
    """A peak that is flagged as too low, and a row that moves nothing on this machine."""
    doubted = row("doubted", peak=10 * MIB, seconds=0.5, peak_ratio=0.1, verdict="withheld")
    notes = (Record(notes={"offloading": "stands in for a GPU"}),)
    stand_in = row("stand-in", peak=10 * MIB, seconds=0.5, peak_ratio=0.1, records=notes)
    assert [figures["stand_in"] for figures in rows_of(row(), stand_in)] == [False, True]
    points = marks(drawn(*FRONT, doubted, stand_in, chart="tradeoff-1"), "point")
    assert {point["strategy"] for point in points} == {"a", "b", "c", "baseline"}


def test_exact_and_inexact_answers_are_told_apart():
    spec = drawn(*FRONT, chart="tradeoff-1")
    filled = {
        value["strategy"]: layer["mark"]["filled"]
        for layer in spec["layer"]
        if layer["mark"]["type"] == "point"
        for value in layer["data"]["values"]
    }
    assert filled == {"baseline": True, "a": True, "b": True, "c": False}
    assert {label["label"] for label in marks(spec, "text")} == {"a", "baseline", "c"}, "what is beaten has no name"


def test_a_page_has_the_charts_that_altair_has_checked():
    drawings = dict(charts.drawings(rows_of(*FRONT)))
    assert drawings and all(charts.spec(draw) == draw().to_dict() for draw in drawings.values())


def test_each_chart_is_drawn_where_there_are_figures_for_it():
    compared = (row(), row("a", peak_ratio=0.9), row("b"), row("a", "b", peak=40 * MIB))
    assert set(pictures_of(rows_of(*compared))) == {"tradeoff-1", "phases-1", "contributions-1"}
    longer = (row(tokens=128), row("a", tokens=128, peak_ratio=0.9))
    both = [*rows_of(*compared), *rows_of(*longer)]
    assert {"tradeoff-2", "phases-2", "lengths-torch-cpu"} <= set(pictures_of(both))
    assert set(pictures_of(rows_of(row(status="unsupported", peak_bytes=None)))) == set()


def test_a_combination_is_a_waterfall_from_the_baseline_to_the_whole():
    spec = drawn(
        row(), row("a", peak=90 * MIB), row("b", peak=70 * MIB), row("a", "b", peak=40 * MIB), chart="contributions-1"
    )
    bars = {bar["step"]: (bar["low"], bar["high"], bar["text"]) for bar in marks(spec, "bar")}
    assert bars == {
        "baseline": (0.0, 100.0, "100"),
        "+ a": (90.0, 100.0, "-10"),
        "+ b": (40.0, 90.0, "-50"),
        "all together": (0.0, 40.0, "40"),
    }
    assert "contributions-1" not in pictures_of(rows_of(row(), row("a", "b", peak=40 * MIB))), "no row between"


def test_a_combination_on_ranks_is_a_waterfall_too():
    divided = [
        replace(each, case=each.case.model_copy(update={"ranks": 2}))
        for each in (row("fsdp", peak=60 * MIB), row("fsdp", "checkpoint", peak=40 * MIB))
    ]
    spec = drawn(row(), divided[0], row("checkpoint", peak=80 * MIB), divided[1], chart="contributions-1")
    texts = {bar["step"]: bar["text"] for bar in marks(spec, "bar")}
    assert texts == {"baseline": "100", "+ fsdp": "-40", "+ checkpoint": "-20", "all together on 2 ranks": "40"}


@pytest.mark.parametrize("on_four", [20, 40])
def test_a_waterfall_is_of_one_number_of_ranks(on_four):
    def on(ranks, *names, peak):
        return replace(row(*names, peak=peak * MIB), case=row(*names).case.model_copy(update={"ranks": ranks}))

    divided = [on(2, "fsdp", peak=60), on(4, "fsdp", peak=30), on(2, "fsdp", "checkpoint", peak=40)]
    others = [on(4, "fsdp", "checkpoint", peak=on_four), on(8, "fsdp", peak=10)]
    spec = drawn(row(), *divided, row("checkpoint", peak=80 * MIB), *others, chart="contributions-1")
    texts = {bar["step"]: bar["text"] for bar in marks(spec, "bar")}
    assert texts == {"baseline": "100", "+ fsdp": "-40", "+ checkpoint": "-20", "all together on 2 ranks": "40"}


def test_of_several_combinations_the_first_with_all_rows_between_is_drawn():
    compared = (row(), row("x", "y", peak=10 * MIB), row("a", peak=90 * MIB), row("a", "b", peak=40 * MIB))
    bars = marks(drawn(*compared, chart="contributions-1"), "bar")
    assert [bar["step"] for bar in bars] == ["baseline", "+ a", "+ b", "all together"]


def test_a_member_of_a_combination_may_come_twice():
    spec = drawn(row(), row("a", peak=90 * MIB), row("a", "a", peak=70 * MIB), chart="contributions-1")
    texts = {bar["step"]: bar["text"] for bar in marks(spec, "bar")}
    assert texts == {"baseline": "100", "+ a": "-10", "+ a again": "-20", "all together": "70"}


def test_a_bar_of_phases_is_as_long_as_the_peak():
    values = marks(drawn(row(), row("a", peak=50 * MIB), chart="phases-1"), "bar")
    sums = {name: sum(each["mib"] for each in values if each["strategy"] == name) for name in ("baseline", "a")}
    assert sums == {"baseline": 100.0, "a": 50.0}


@pytest.mark.parametrize(
    ("low", "high", "due"),
    [
        (0.79, 1.08, [0.8, 0.85, 0.9, 0.95, 1.0, 1.05]),
        (0.18, 1.25, [0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2]),
        (0.9, 99.0, [1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 80.0]),
    ],
)
def test_an_axis_has_round_figures_that_do_not_crowd_it(low: float, high: float, due: list[float]):
    assert ticks(low, high) == pytest.approx(due)


def test_names_of_points_lie_apart_and_cover_no_point():
    """Those that lie on one height, at times so near that one name would cover the other."""
    near = [row(f"strategy_{at}", seconds=1 - at / 100, peak_ratio=0.5 + at / 1e4) for at in range(4)]
    spec = drawn(row(), *near, chart="tradeoff-1")
    names, points = marks(spec, "text"), marks(spec, "point")
    assert len(names) == 5 and len(points) == 5
    ends = {axis: next(layer["encoding"][axis]["scale"]["domain"] for layer in spec["layer"]) for axis in "xy"}

    def at(value: float, axis: str, pixels: int) -> float:
        low, high = ends[axis]
        return pixels * math.log(value / low) / math.log(high / low)

    places = {name["label"]: (at(name["name_x"], "x", WIDTH), at(name["name_y"], "y", HEIGHT)) for name in names}
    spans = {
        name["label"]: sorted((places[name["label"]][0], places[name["label"]][0] + sign * 6 * len(name["label"])))
        for name in names
        for sign in [1 if name["align"] == "left" else -1]
    }
    for one, other in itertools.combinations(places, 2):
        apart = max(spans[one][0], spans[other][0]) - min(spans[one][1], spans[other][1])
        assert apart > 0 or abs(places[one][1] - places[other][1]) > 11, (one, other)
    for point in points:
        x, y = at(point["time_ratio"], "x", WIDTH), at(point["peak_ratio"], "y", HEIGHT)
        for label, (low, high) in spans.items():
            assert not low < x < high or abs(places[label][1] - y) > 10, (label, point["strategy"])


def test_rows_whose_names_begin_alike_stay_apart():
    alike = [(f"a_strategy_with_a_long_name_that_says_much_of_it_{end}",) for end in ("here", "there")]
    rows = [row(*names, peak=peak, records=()) for names, peak in zip(alike, (50 * MIB, 60 * MIB), strict=True)]
    figures = [each | {"ranks": 2, "rank_peaks": [each["peak_bytes"]]} for each in rows_of(*rows)]
    spec = charts.ranks([*rows_of(row()), *figures]).to_dict()
    assert spec["layer"][0]["encoding"]["y"]["field"] == "strategy"
    assert {bar["strategy"]: bar["mib"] for bar in marks(spec, "bar")} == {alike[0][0]: 50.0, alike[1][0]: 60.0}


def test_a_title_says_all_of_the_comparison():
    long = {**rows_of(row())[0], "comparison": "decoder on torch/cpu, " + ", ".join(f"size {at}" for at in range(20))}
    title = charts.phases([long | {"composition": {"loss": MIB}}]).to_dict()["title"]
    assert " ".join(title) == long["comparison"] and max(map(len, title)) < 80


def test_lines_of_growth_are_named_at_their_ends_apart_from_each_other():
    rows = [
        *rows_of(row(), row("a"), row("b", peak=101 * MIB)),
        *rows_of(row(tokens=128), row("a", tokens=128, status="skipped", peak_bytes=None), row("b", tokens=128)),
    ]
    spec = charts.lengths(rows).to_dict()
    lines, hollow, rule, names = spec["layer"]
    assert len(lines["data"]["values"]) == 5 and len(hollow["data"]["values"]) == 6
    assert hollow["mark"]["filled"] is False and rule["encoding"]["y"] == {"datum": 1024.0}
    assert lines["encoding"]["color"]["legend"] is None
    places = [math.log(value["place"]) for value in names["data"]["values"]]
    assert len(places) == 3 and {value["tokens"] for value in names["data"]["values"]} == {128}
    span = math.log(
        spec["layer"][0]["encoding"]["y"]["scale"]["domain"][1]
        / spec["layer"][0]["encoding"]["y"]["scale"]["domain"][0]
    )
    gaps = [(b - a) / span * spec["height"] for a, b in itertools.pairwise(sorted(places))]
    assert min(gaps) > 12


def of_sizes(*sizes: dict[str, Any], utc: str = "") -> list[export.Figures]:
    """Return the figures of comparisons of a suite, each of a baseline and a strategy."""
    tables = []
    for each in sizes:
        about = {"budget_bytes": each.get("budget"), "corpus": each.get("corpus", "x")}
        shape = {"tokens": each["tokens"], "layers": each.get("layers", 2)}
        machine = Origin(machine={"name": each.get("machine", "m")}, utc=utc)
        record = Record(slot=Slot(case="x", kind="memory"), origin=machine)
        rows = tuple(
            replace(one, case=one.case.model_copy(update={"shape": shape, **about}), records=(record,))
            for one in (row(), row("a"))
        )
        tables.append(Comparison(rows[0].case, rows))
    return export.of_tables("mine", tables, {})


def growth(*sizes: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Return the title and the lengths of each picture of growth."""
    pictures = {name: chart.to_dict() for name, chart in pictures_of(of_sizes(*sizes)).items() if "lengths" in name}
    return {
        name: (" ".join(spec["title"]), sorted({value["tokens"] for value in marks(spec, "line")}))
        for name, spec in pictures.items()
    }


@pytest.mark.parametrize(
    "other", [{"layers": 12}, {"corpus": "y"}, {"machine": "n"}], ids=lambda other: next(iter(other))
)
def test_no_line_joins_comparisons_that_differ_in_more_than_their_length(other: dict[str, Any]):
    assert growth({"tokens": 64}, {"tokens": 128, **other}) == {}
    alone = growth({"tokens": 64, **other}, {"tokens": 64}, {"tokens": 128})
    assert alone == {"lengths-torch-cpu": ("mine on torch/cpu", [64, 128])}


def test_each_group_of_lengths_has_a_picture_whose_title_says_which():
    one = [{"tokens": 64, "layers": 2}, {"tokens": 128, "layers": 2}]
    two = [{"tokens": tokens, "layers": 4, "machine": "n"} for tokens in (64, 256)]
    assert growth(*one, *two) == {
        "lengths-torch-cpu": ("mine on torch/cpu, layers 2, on m", [64, 128]),
        "lengths-torch-cpu-2": ("mine on torch/cpu, layers 4, on n", [64, 256]),
    }


def test_a_budget_may_follow_the_length():
    small, large = 1 << 30, 2 << 30
    assert growth({"tokens": 64, "budget": small}, {"tokens": 128, "budget": large}) == {
        "lengths-torch-cpu": ("mine on torch/cpu", [64, 128])
    }
    both = [{"tokens": tokens, "budget": budget} for tokens in (64, 128) for budget in (small, large)]
    assert growth(*both) == {
        "lengths-torch-cpu": ("mine on torch/cpu, budget 1,024 MiB", [64, 128]),
        "lengths-torch-cpu-2": ("mine on torch/cpu, budget 2,048 MiB", [64, 128]),
    }


def test_runs_of_one_machine_are_joined_only_where_each_length_has_one():
    runs = {
        utc: of_sizes({"tokens": 64}, {"tokens": 128}, utc=utc)
        for utc in ("2026-11-26T09:46:17", "2026-11-27T09:46:17")
    }
    figures = [each | {"comparison": f"{each['comparison']}, {utc}"} for utc, run in runs.items() for each in run]
    assert [each["run_utc"] for each in figures] == [utc for utc in runs for _ in range(4)]

    def titles(rows: list[export.Figures]) -> list[str]:
        return [" ".join(chart.to_dict()["title"]) for name, chart in pictures_of(rows).items() if "lengths" in name]

    assert titles(figures) == [f"mine on torch/cpu, run of 2026-11-{day} 09:46:17" for day in (26, 27)]
    assert titles([*figures[:2], *figures[6:]]) == ["mine on torch/cpu"]


def test_one_length_with_a_peak_is_no_growth():
    rows = of_sizes({"tokens": 64}, {"tokens": 128})
    unknown = {"status": "oom_budget", "peak_bytes": None, "predicted_bytes": None}
    half = [figures | (unknown if figures["shape"]["tokens"] == 128 else {}) for figures in rows]
    assert "lengths-torch-cpu" not in pictures_of(half)


def test_what_each_rank_holds_stands_beside_one_process():
    ranks = tuple(Rank(peak_bytes=size * MIB) for size in (30, 40))
    case = row("a").case.model_copy(update={"ranks": 2})
    divided = replace(row("a", peak=40 * MIB), case=case, records=(Record(memory=Memory(ranks=ranks)),))
    spec = drawn(row(), divided, chart="ranks-1")
    assert [value["mib"] for value in marks(spec, "point")] == [30.0, 40.0]
    assert spec["layer"][-1]["encoding"]["x"] == {"datum": 100.0}
    assert "ranks-1" not in pictures_of(rows_of(row(status="oom_budget"), divided)), "its peak is not known"


def test_pictures_are_files_whose_text_is_inert(tmp_path):
    hostile = "</text><script>alert(1)</script>"
    made = pictures_of(rows_of(row(), row(hostile, peak_ratio=0.9)))
    found = sorted(path.name for path in charts.save(made, tmp_path / "new", "mine"))
    assert found == ["mine-phases-1.png", "mine-phases-1.svg", "mine-tradeoff-1.png", "mine-tradeoff-1.svg"]
    svg = (tmp_path / "new" / "mine-tradeoff-1.svg").read_text()
    assert "<svg" in svg and "<script" not in svg and "alert" in svg
    assert (tmp_path / "new" / "mine-phases-1.png").read_bytes().startswith(b"\x89PNG")


class Blank:
    """A chart that takes no time to draw."""

    def configure(self, **settings):
        return self

    def save(self, path, **options):
        path.write_text("")


def test_no_name_of_a_suite_leads_out_of_the_folder_for_pictures(tmp_path):
    paths = list(charts.save({"phases-1": Blank()}, tmp_path / "new", "../mine\0"))
    assert [path.name for path in paths] == ["..-mine--phases-1.svg", "..-mine--phases-1.png"]
    assert {path.parent for path in paths} == {tmp_path / "new"}


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(PicturesError, match=r"install it, or the extra 'pictures'"):
        charts.tradeoff(rows_of(row(), row("a", peak_ratio=0.9)))


def test_the_command_writes_every_form(here, tmp_path):
    losses = str(ROOT / "results" / "losses")
    (_, as_json, _), (_, as_csv, _) = (here(tmp_path, "report", losses, "--format", form) for form in ("json", "csv"))
    rows = json.loads(as_json)
    assert len(rows) == len(list(csv.DictReader(io.StringIO(as_csv)))) > 10
    assert {each["suite"] for each in rows} == {"losses"}
    assert here(tmp_path, "report", losses, "--pictures", "pictures")[:2] == (0, "")
    assert {path.suffix for path in (tmp_path / "pictures").iterdir()} == {".svg", ".png"}
    for options in ((), ("--pictures", "pictures")):
        status, _, errors = here(tmp_path, "report", losses, "--into", "missing.md", *options)
        assert status == 2 and "missing.md' cannot be read" in errors and "Traceback" not in errors
    (tmp_path / "file").write_text("")
    status, _, errors = here(tmp_path, "report", losses, "--pictures", "file")
    assert status == 2 and "name another" in errors


def test_every_figure_of_a_row_stands_under_its_own_name():
    """No two of them are equal, so that none can stand for another."""
    records = tuple(Record(times=Times(step_seconds=(1.0,), first_step_seconds=first)) for first in (3.0, 5.0, 4.5))
    figures: dict[str, Any] = {
        "peak_bytes": 11, "peak_ratio": 0.12, "memory": "less", "predicted_bytes": 16, "at_most_bytes": 17,
        "at_most_coverage": 0.18, "residual_bytes": -5, "residual_ratio": -0.31, "floor_bytes": 19, "floor_ratio": 0.2,
        "step_seconds": 2.5, "fetch_seconds": 0.22,
    }  # fmt: skip
    (exported,) = rows_of(row("a", records=records, native_bytes=(13, 14), native_ratio=0.15, **figures))
    figures |= {"native_peak_bytes_low": 13, "native_peak_bytes_high": 14, "native_peak_ratio": 0.15}
    figures |= {"first_step_seconds": 4.5, "tokens_per_second": 25.6, "budget_bytes": 1 << 30}
    assert {name: exported[name] for name in figures} == figures


def test_services_get_each_figure_in_the_unit_that_it_has_there():
    speed = Speed(0.5, Interval(0.4, 0.6), "faster", 4, None, 0.02, 9)
    figures = rows_of(row(peak=3 * MIB, seconds=0.5), row("a", peak=2 * MIB, seconds=0.25, speed=speed))
    entries = json.loads(formats.benchmark_action(figures))
    assert [(each["name"].rpartition(" / ")[2], each["value"], each["unit"]) for each in entries] == [
        ("baseline: peak", 3.0, "MiB"),
        ("baseline: step", 500.0, "ms"),
        ("a: peak", 2.0, "MiB"),
        ("a: step", 250.0, "ms"),
    ]
    assert (entries[-1]["range"], entries[-1]["extra"]) == ("± 50", "wins, answer bit_exact, commit c")
    _, metrics = json.loads(formats.bencher(figures)).values()
    assert metrics["peak-memory"] == {"value": 2 * MIB}
    assert metrics["latency"] == pytest.approx({"value": 2.5e8, "lower_value": 2e8, "upper_value": 3e8})


def test_what_a_peak_is_made_of_is_of_the_repetition_that_showed_it():
    def repeat(peak, phase):
        phases = (Phase(name=phase, entry_bytes=0, peak_bytes=peak, exit_bytes=0),)
        return Record(
            memory=Memory(phases=phases, peak_host_bytes=peak, peak_phase=phase), slot=Slot(case="c", kind="memory")
        )

    records = (repeat(90 * MIB, "loss"), repeat(100 * MIB, "backward"), repeat(95 * MIB, "loss"))
    (figures,) = rows_of(row(records=records, peak_phase="backward", peak=130 * MIB))
    assert figures["composition"] == {"backward": 100 * MIB, "child processes": 30 * MIB}
    assert sum(figures["composition"].values()) == figures["peak_bytes"]
