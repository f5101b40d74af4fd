"""Rows over commits: equal runs give no alarm, and a peak that grew by 2 % is seen each time."""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.records import Applied, Case, Memory, Origin, Prediction, Record, Slot, Times, store
from harness.records.record import Verdict
from harness.report.charts.commits import commits
from harness.report.history import text
from harness.verbs.history import Point, Run, Series, Step, series, steps
from harness.verdicts import judge

MIB = 1 << 20
PLAIN = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
CASES = [
    PLAIN,
    *(
        PLAIN.model_copy(update={"strategies": (Applied(name=name),)})
        for name in ("nothing", "checkpoint", "fused_loss")
    ),
]
ROUNDS, LAST = 8, 3


def recorded(draw: random.Random, number: int, peak: float = 1.0, time: float = 1.0) -> list[Record]:
    """Make up a run: peaks that scatter by 0.2 %, times by 3 % and with the day; the last row's grew by a factor."""
    day = draw.uniform(0.7, 1.4)
    origin = Origin(
        suite="mine", commit=f"c{number:03d}", utc=f"2026-01-01T{number % 24:02d}:00:00+00:00", machine={"name": "m"}
    )
    records = []
    for at, case in enumerate(CASES):
        grown = (peak, time) if at == LAST else (1.0, 1.0)
        base = 100 * MIB if at < LAST else 60 * MIB
        for repeat in range(3):
            memory = Memory(
                peak_host_bytes=round(base * grown[0] * draw.gauss(1, 0.002)), resolution_bytes=1 << 16,
                losses=(1.0, 0.9, 0.8), regime="glibc-pinned", peak_phase="loss",
            )  # fmt: skip
            records.append(
                Record(
                    slot=Slot(case=case.digest(), kind="memory", repeat=repeat), case=case, origin=origin, memory=memory
                )
            )
        rung = Verdict("bit_exact", 1.0, None, None, None, (), "it is")
        records.append(Record(slot=Slot(case=case.digest(), kind="numerics"), case=case, origin=origin, numerics=rung))
        for round_ in range(ROUNDS):
            level = day * draw.gauss(1, 0.01) * grown[1]
            step = tuple(level * draw.gauss(1, 0.03) for _ in range(3))
            slot = Slot(case=case.digest(), kind="time", round=round_)
            records.append(Record(slot=slot, case=case, origin=origin, times=Times(step_seconds=step)))
    return records


def test_a_peak_that_cannot_be_relied_on_or_may_be_as_before_makes_no_step() -> None:
    def steps_of(after: Point) -> list[Step]:
        before = Point("a", "", "ok", 100 * MIB, 4096, None, 100 * MIB)
        return steps([before, after])

    grown = Point("b", "", "ok", 130 * MIB, 4096, None, 130 * MIB)
    (step,) = steps_of(grown)
    assert step.figure == "peak" and step.ratio == 1.3
    assert steps_of(replace(grown, sure=False)) == []
    assert steps_of(replace(grown, least_bytes=100 * MIB)) == [], "its repetitions differ as much"


def run_of(records: list[Record]) -> Run:
    return Run("mine", records, judge.judge(records))


def test_200_equal_runs_give_no_alarm_and_each_grown_peak_is_seen() -> None:
    draw = random.Random(7)
    equal = [run_of(recorded(draw, number)) for number in range(201)]
    assert [step for each in series(equal) for step in each.steps] == []
    missed = 0
    for number in range(0, 200, 5):
        after = run_of(recorded(draw, number, peak=1.02))
        (grown,) = (each for each in series([equal[number], after]) if each.case.label == "fused_loss")
        missed += not any(step.figure == "peak" and step.worse for step in grown.steps)
    assert missed == 0


def test_a_time_that_doubled_is_a_step_and_another_day_is_none() -> None:
    draw = random.Random(3)
    before, after = run_of(recorded(draw, 0)), run_of(recorded(draw, 1, time=1.5))
    found = [(each.case.label, step.figure) for each in series([before, after]) for step in each.steps]
    assert found == [("fused_loss", "time")]


def test_machines_are_never_mixed_and_a_row_that_fails_is_a_step() -> None:
    draw = random.Random(3)
    records = recorded(draw, 0)
    other = [each.model_copy(update={"origin": each.origin.model_copy(update={"machine": {"name": "n"}})})
             for each in recorded(draw, 1, peak=2.0)]  # fmt: skip
    apart = series([run_of(records), run_of(other)])
    assert len(apart) == 8 and not any(each.steps for each in apart)
    failed = [
        each.model_copy(update={"status": "crash", "memory": Memory()})
        if each.slot and each.slot.kind == "memory" and each.case == CASES[LAST]
        else each
        for each in recorded(draw, 2)
    ]
    (grown,) = (each for each in series([run_of(records), run_of(failed)]) if each.case.label == "fused_loss")
    assert [step.figure for step in grown.steps] == ["status"] and grown.steps[0].worse


def test_the_machine_of_a_row_is_the_one_that_measured_it_and_not_the_one_that_began_the_run() -> None:
    draw = random.Random(3)
    first = Record(case=PLAIN, origin=Origin(suite="mine", commit="c", machine={"name": "head"}))

    def on(machine: str, peak: float) -> Run:
        origin = Origin(suite="mine", commit="c", machine={"name": machine})
        return run_of([first, *(each.model_copy(update={"origin": origin}) for each in recorded(draw, 0, peak=peak))])

    histories = series([on("worker-a", 1.0), on("worker-b", 1.5)])
    assert {each.machine for each in histories} == {"worker-a", "worker-b"}
    assert len(histories) == 2 * len(CASES) and not any(each.steps for each in histories)


def test_rows_of_equal_headings_are_told_apart_by_their_sizes_and_machines() -> None:
    draw = random.Random(3)

    def sized(heads: int, machine: str) -> Run:
        case = PLAIN.model_copy(update={"shape": {"tokens": 64, "heads": heads}})
        origin = Origin(commit="c", machine={"name": machine})
        memory = Memory(peak_host_bytes=draw.randrange(MIB, 2 * MIB), losses=(1.0,), regime="glibc-pinned")
        record = Record(slot=Slot(case=case.digest(), kind="memory"), case=case, origin=origin, memory=memory)
        return run_of([record])

    shown = text(series([sized(4, "m"), sized(8, "m"), sized(8, "n")]), everything=True)
    titles = [line.partition("bytes of x")[2] for line in shown.splitlines() if line.startswith("####")]
    assert titles == [", heads 4: baseline", ", heads 8, on m: baseline", ", heads 8, on n: baseline"]


@pytest.mark.usefixtures("pictures")
def test_text_and_picture_name_the_commits_of_a_step() -> None:
    draw = random.Random(3)
    runs = [run_of(recorded(draw, number, peak=1.0 if number < 2 else 1.3)) for number in range(4)]
    found = series(runs)
    shown = text(found)
    assert "1 jump for the worse, 0 for the better" in shown
    row = "`fused_loss` of mine: decoder on torch/cpu, 64 tokens, bytes of x"
    assert f"| {row} | peak     | 60" in shown and "`c001` to `c002`" in shown
    values = commits(found, "mine").to_dict()["layer"][1]["data"]["values"]
    assert [value["run"] for value in values if value["step"]] == ["3 c002"]
    assert commits(series(runs[:1]), "mine") is None


def sized(tokens: int, number: int, machine: str = "m", commit: str = "") -> Run:
    """A run of one row, whose peak grows from run to run."""
    case = PLAIN.model_copy(update={"shape": {"tokens": tokens}})
    origin = Origin(commit=commit or f"c{number}", utc=f"2026-01-0{number}T00:00:00+00:00", machine={"name": machine})
    memory = Memory(peak_host_bytes=tokens * number * MIB, losses=(1.0,), regime="glibc-pinned", resolution_bytes=4096)
    return run_of([Record(slot=Slot(case=case.digest(), kind="memory"), case=case, origin=origin, memory=memory)])


@pytest.mark.usefixtures("pictures")
def test_rows_of_one_name_say_of_which_comparison_they_are() -> None:
    wheres = [(64, "m"), (128, "m"), (128, "n")]
    found = series([sized(tokens, number, machine) for number in (1, 2) for tokens, machine in wheres])
    steps = [line.split("|")[1].strip() for line in text(found).splitlines() if " to `c2`" in line]
    assert steps == [
        "baseline of mine: decoder on torch/cpu, 64 tokens, bytes of x",
        "baseline of mine: decoder on torch/cpu, 128 tokens, bytes of x, on m",
        "baseline of mine: decoder on torch/cpu, 128 tokens, bytes of x, on n",
    ]
    ends = commits(found, "mine").to_dict()["layer"][2]["data"]["values"]
    assert [end["row"] for end in ends] == [
        "baseline: 64 tokens",
        "baseline: 128 tokens, on m",
        "baseline: 128 tokens, on n",
    ]
    ends = commits(found[:1], "mine").to_dict()["layer"][2]["data"]["values"]
    assert [end["row"] for end in ends] == ["baseline"], "of one comparison there is nothing to tell"


@pytest.mark.usefixtures("pictures")
def test_a_picture_names_code_that_was_never_committed_in_full() -> None:
    runs = [sized(64, number, commit=name) for number, name in enumerate(["0123456789ab-dirty", "unversioned"], 1)]
    values = commits(series(runs), "mine").to_dict()["layer"][1]["data"]["values"]
    assert [value["run"] for value in values] == ["1 0123456-dirty", "2 unversioned"]


def test_a_row_that_runs_no_longer_stands_before_a_peak_that_grew() -> None:
    point = Point("c1", "2026-01-01", "ok", MIB, 4096, None)
    failed = Point("c2", "2026-01-02", "crash", None, 4096, None)
    steps = (
        Step("peak", point, point, 0.5),
        Step("status", failed, point, None),
        Step("peak", point, point, 1.02),
        Step("status", point, failed, None),
        Step("peak", point, point, 1.5),
    )
    shown = text([Series("mine", "m", PLAIN, (point, failed), steps)])
    cells = [line.split("|") for line in shown.splitlines() if " to `c" in line]
    changes = [(each[2].strip(), each[5].strip()) for each in cells]
    assert changes == [("status", ""), ("peak", "1.50 x"), ("peak", "1.02 x"), ("peak", "0.50 x"), ("status", "")]


def interrupted(records: list[Record], *kinds: str) -> list[Record]:
    """Return a run that predicted its last row, and did not come to what it measures of it in these kinds."""
    left = [each for each in records if each.slot and not (each.case == CASES[LAST] and each.slot.kind in kinds)]
    predicted = Record(
        slot=Slot(case=CASES[LAST].digest(), kind="predict"),
        case=CASES[LAST],
        origin=records[0].origin,
        prediction=Prediction(predicted_peak_bytes=60 * MIB),
    )
    return [*left, predicted]


def test_an_interrupted_run_is_no_step_and_hides_none() -> None:
    draw = random.Random(3)
    before, after = recorded(draw, 0), recorded(draw, 2, peak=2.0, time=2.0)
    ends = [run_of(before), run_of(interrupted(recorded(draw, 1), "memory", "time")), run_of(after)]
    (grown,) = (each for each in series(ends) if each.case.label == "fused_loss")
    assert [point.commit for point in grown.points] == ["c000", "c002"]
    assert [(step.figure, step.before.commit, step.after.commit) for step in grown.steps] == [
        ("peak", "c000", "c002"),
        ("time", "c000", "c002"),
    ]
    (alone,) = (each for each in series(ends[:2]) if each.case.label == "fused_loss")
    assert alone.steps == (), "which would be one to worse"


def test_a_run_that_lacks_a_figure_hides_no_step_of_it() -> None:
    draw = random.Random(3)
    untimed = run_of(interrupted(recorded(draw, 1), "time"))
    crashed = [
        each.model_copy(update={"status": "crash", "memory": Memory()})
        if each.slot and each.slot.kind == "memory" and each.case == CASES[LAST]
        else each
        for each in interrupted(recorded(draw, 2), "time")
    ]
    runs = [run_of(recorded(draw, 0)), untimed, run_of(crashed), run_of(recorded(draw, 3, peak=2.0, time=2.0))]
    (grown,) = (each for each in series(runs) if each.case.label == "fused_loss")
    assert [(step.figure, step.before.commit, step.after.commit) for step in grown.steps] == [
        ("status", "c001", "c002"),
        ("status", "c002", "c003"),
        ("peak", "c001", "c003"),
        ("time", "c000", "c003"),
    ]


@pytest.mark.parametrize(("status", "stepped"), [("crash", True), ("killed_unknown", False), ("skipped_guard", False)])
def test_what_the_machine_did_to_a_run_is_no_step_of_its_rows(status: str, stepped: bool) -> None:
    draw = random.Random(3)
    ended = [
        each.model_copy(update={"status": status, "memory": Memory()})
        if each.slot and each.slot.kind == "memory" and each.case == CASES[LAST]
        else each
        for each in recorded(draw, 1)
    ]
    runs = [run_of(recorded(draw, 0)), run_of(ended), run_of(recorded(draw, 2))]
    (row,) = (each for each in series(runs) if each.case.label == "fused_loss")
    assert [point.status for point in row.points] == ["ok", status, "ok"]
    assert bool(row.steps) == stepped


@pytest.mark.usefixtures("pictures")
def test_a_row_that_joined_later_stands_at_its_own_runs() -> None:
    draw = random.Random(3)
    spans = {"fused_loss": range(10, 12), "checkpoint": range(11)}

    def at(number: int) -> Run:
        records = recorded(draw, number)
        return run_of([each for each in records if each.case and number in spans.get(each.case.label, range(12))])

    runs = [at(number) for number in range(12)]
    layers = commits(series(runs), "mine").to_dict()["layer"]
    of_row: dict[str, list[str]] = {}
    for value in layers[1]["data"]["values"]:
        of_row.setdefault(value["row"], []).append(value["run"])
    assert of_row["fused_loss"] == ["11 c010", "12 c011"]
    assert of_row["baseline"][0] == "01 c000" and of_row["baseline"] == sorted(of_row["baseline"])
    names = {value["row"]: value["run"] for value in layers[2]["data"]["values"]}
    last = "12 c011"
    assert names == {"baseline": last, "nothing": last, "fused_loss": last, "checkpoint": "11 c010"}


@pytest.mark.usefixtures("pictures")
def test_rows_of_one_name_are_lines_of_their_own() -> None:
    draw = random.Random(3)
    runs = [run_of(recorded(draw, number, peak=1.0)) for number in range(2)]
    lines = commits([*series(runs), *series(runs)], "mine").to_dict()["layer"][1]["data"]["values"]
    assert len({value["id"] for value in lines}) == 2 * len({value["row"] for value in lines})


@pytest.mark.usefixtures("pictures")
def test_the_command_reads_all_files_of_a_folder(tmp_path: Path) -> None:
    draw = random.Random(3)
    folder = tmp_path / "results" / "mine" / "m"
    for number in range(2):
        file = store.next_file(folder, f"c{number:03d}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(store.encoded(each) for each in recorded(draw, number, peak=1 + number)))
    command = [sys.executable, "-m", "harness", "history", "results", "--by", "commit"]
    done = subprocess.run([*command, "--pictures", "pictures"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 jump for the worse" in done.stdout and (tmp_path / "pictures" / "mine-history.svg").is_file()
    for name, refusal in (("nowhere", "run a suite first"), (str(file), "name the folder that it lies in")):
        done = subprocess.run([*command[:-3], name], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and refusal in done.stderr


@pytest.mark.parametrize("by", ["day", ""])
def test_another_order_is_refused(by: str, here: Callable[..., tuple[object, str, str]], tmp_path: Path) -> None:
    status, _, errors = here(tmp_path, "history", ".", "--by", by)
    assert status == 2 and "--by" in errors, "and not because there are no results"


@pytest.mark.usefixtures("pictures")
def test_what_a_row_had_taken_when_it_failed_is_no_peak_of_it() -> None:
    draw = random.Random(3)
    failed = [
        each.model_copy(update={"status": "oom_budget"})
        if each.slot and each.slot.kind == "memory" and each.case == CASES[LAST]
        else each
        for each in recorded(draw, 1)
    ]
    histories = series([run_of(recorded(draw, 0)), run_of(failed)])
    (row,) = (each for each in histories if each.case.label == "fused_loss")
    assert [(point.status, bool(point.peak_bytes)) for point in row.points] == [("ok", True), ("oom_budget", False)]
    values = commits([row], "mine").to_dict()["layer"][1]["data"]["values"]
    assert [value["run"] for value in values] == ["1 c000"]


def test_a_row_that_nobody_has_and_a_picture_of_nothing_are_said(
    here: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "results" / "mine" / "m"
    folder.mkdir(parents=True)
    (folder / "1.jsonl").write_bytes(b"".join(map(store.encoded, recorded(random.Random(3), 0))))
    status, shown, errors = here(tmp_path, "history", "results", "-k", "fusd")
    assert (status, shown) == (2, "") and "no row in 'results' has a name that contains 'fusd': leave out -k" in errors
    status, shown, errors = here(tmp_path, "history", "results", "--pictures", "pictures")
    assert status == 0 and "4 rows, 0 of them in more than one run" in shown
    assert "nothing to draw" in errors and not (tmp_path / "pictures").exists()


def test_a_row_is_followed_over_runs_from_before_a_size_was_there(
    here: Callable[..., tuple[object, str, str]], tmp_path: Path
) -> None:
    folder = tmp_path / "results" / "mine" / "m"
    folder.mkdir(parents=True)
    for number, sizes in enumerate(
        ({}, {"head_bias": False}, {"head_bias": False, "positions": "rotary"}, {"heads": 8})
    ):
        records = [
            each.model_copy(update={"case": case, "slot": each.slot.model_copy(update={"case": case.digest()})})
            for each in recorded(random.Random(number), number)
            if each.case and each.slot
            for case in [each.case.model_copy(update={"shape": {**each.case.shape, **sizes}})]
        ]
        (folder / f"{number}.jsonl").write_bytes(b"".join(map(store.encoded, records)))
    status, shown, errors = here(tmp_path, "history", "results", "--all")
    assert status == 0, errors
    assert shown.startswith("8 rows, 4 of them in more than one run")
    assert [shown.count(f"| `c00{number}`") for number in range(4)] == [4, 4, 4, 4]
    assert "positions" not in shown and "head bias" not in shown, "all have the same"


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("count", [2, 24, 60])
def test_names_stand_at_the_right_edge_and_none_lies_over_another(count: int) -> None:
    point = Point("c1", "2026-01-01", "ok", 100 * MIB, 4096, None)
    rows = [
        Series("mine", "m", PLAIN.model_copy(update={"strategies": (Applied(name=f"s{at}"),)}), points, ())
        for at in range(count)
        for points in [(point, replace(point, commit="c2", utc="2026-01-02", peak_bytes=(100 + at % 3) * MIB))]
    ]
    chart = commits(rows, "mine").to_dict()
    names = chart["layer"][2]
    assert names["encoding"]["x"] == {"value": "width"}
    low, high = names["encoding"]["y"]["scale"]["domain"]
    places = sorted(math.log(value["place"]) for value in names["data"]["values"])
    apart = [(b - a) / math.log(high / low) * chart["height"] for a, b in itertools.pairwise(places)]
    assert len(places) == count and min(apart) > 12.9
    assert math.log(low) - 1e-9 <= places[0] and places[-1] <= math.log(high) + 1e-9


@pytest.mark.usefixtures("pictures")
def test_names_tell_apart_the_rows_that_are_drawn_and_no_others() -> None:
    drawn, lone = [sized(64, number) for number in (1, 2)], sized(128, 1)
    values = commits(series([*drawn, lone]), "mine").to_dict()["layer"][2]["data"]["values"]
    assert [value["row"] for value in values] == ["baseline"]
