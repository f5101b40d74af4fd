"""The harness from Python: frames of results, of records and of predictions, and the forms that services take."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.backends.cards import CARDS
from harness.machine import facts, gpu
from harness.machine.environment import cache_folder
from harness.machine.gpu import Gpu
from harness.records import Case, Origin, Record, Slot, Times, store
from harness.records.record import heading_of
from harness.records.store import StoreError
from harness.refusal import Refusal
from harness.report import door, formats, frame
from harness.report.insert import InsertError
from harness.suite.bounds import SuiteError
from harness.verbs.machine import Machine
from harness.verbs.plan import PlanRow
from harness.verdicts.expressions import ClaimError

pandas = pytest.importorskip("pandas", reason="needs the package pandas")
ROOT = Path(__file__).resolve().parents[3]
LOSSES = ROOT / "results" / "losses"


@pytest.fixture(scope="module")
def report() -> Any:
    return harness.read(LOSSES)


def test_a_frame_has_one_row_a_strategy_with_numbers(report: Any) -> None:
    rows = report.frame()
    assert len(rows) == len(report.figures) > 10
    assert set(rows.suite) == {"losses"} and rows.peak_bytes.dtype.kind == "f"
    measured = rows[rows.status == "ok"]
    assert (measured.peak_bytes > 0).all() and measured["shape.tokens"].notna().all()
    assert measured["phases.init"].notna().any() and measured["composition.loss"].notna().any()


def test_a_frame_of_records_has_one_row_a_process(report: Any) -> None:
    records = report.records()
    (results,) = report.results
    assert len(records) == sum(record.slot is not None for record in results.records)
    times = records[records.kind == "time"]
    assert (times.median_step_seconds > 0).all() and all(isinstance(each, list) for each in times.step_seconds)
    assert set(records.place) >= {"torch/cpu", "jax/cpu"}
    assert (records[records.kind == "memory"].peak_host_bytes.dropna() > 0).all()


def test_results_come_with_the_harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which files they are; that each of them can be read is tested with the store."""
    files = []
    monkeypatch.setattr(store, "read", lambda file, aliases: files.append(file) or ([Record()], []))
    monkeypatch.setattr(store, "notes_of_parts", lambda path: [])
    monkeypatch.chdir(tmp_path)
    assert {each.folder for each in harness.read().results} >= {"losses", "long_context"}
    assert sorted(files) == sorted(store.newest(ROOT / "results"))


def test_several_folders_are_read_together() -> None:
    both = harness.read(LOSSES, str(ROOT / "results" / "scans"))
    assert set(both.frame().suite) == {"losses", "scans"}


def test_a_file_that_is_named_twice_is_read_once() -> None:
    (file,) = store.newest(LOSSES)
    once = harness.read(LOSSES)
    twice = harness.read(LOSSES, file, file.parent / ".." / file.parent.name / file.name)
    assert len(twice.frame()) == len(once.frame())


def test_a_damaged_line_is_a_warning_and_no_results_a_sentence(tmp_path: Path) -> None:
    (file,) = store.newest(LOSSES)
    lines = file.read_bytes().splitlines(keepends=True)
    folder = tmp_path / "losses" / "machine"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:3]) + b'{"torn": \n' + b"".join(lines[3:]))
    with pytest.warns(UserWarning, match="is not a record"):
        read = harness.read(tmp_path)
    assert len(read.frame()) == len(harness.read(LOSSES).frame())
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="run a suite first"):
        harness.read(tmp_path / "empty")
    with pytest.raises(StoreError, match="name a results file or folder"):
        harness.read(tmp_path / "nowhere")
    (tmp_path / "empty" / "machine").mkdir()
    (tmp_path / "empty" / "machine" / "a.jsonl").write_text("")
    with pytest.raises(StoreError, match="there is no record in"):
        harness.read(tmp_path / "empty")


def test_a_document_that_is_for_reading_alone_is_refused_in_a_sentence(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "document.md"
    document.write_text("<!-- generated: losses -->\n<!-- end: losses -->\n")

    def refuse(*names: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(InsertError, match=r"document.md' cannot be written \(Read-only file system\): give rights"):
        report.put_into(document)


def test_a_disk_that_is_full_costs_no_text_of_a_document(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "document.md"
    text = "<!-- generated: losses -->\n<!-- end: losses -->\n" + "mine\n" * 100
    document.write_text(text)
    document.chmod(0o640)
    written = Path.write_text

    def half(path: Path, text: str, **options: Any) -> None:
        written(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", half)
        with pytest.raises(InsertError, match="No space left on device"):
            report.put_into(document)
    assert document.read_text() == text and list(tmp_path.iterdir()) == [document]
    report.put_into(document)
    assert document.read_text().endswith("mine\n" * 100) and len(document.read_text()) > len(text)
    assert document.stat().st_mode & 0o777 == 0o640


def test_results_of_two_machines_stay_apart(tmp_path: Path) -> None:
    (file,) = store.newest(LOSSES)
    for machine in ("one", "two"):
        folder = tmp_path / "losses" / machine
        folder.mkdir(parents=True)
        text = file.read_text().replace('"name": "linux-', f'"name": "{machine}-')
        (folder / file.name).write_text(text)
    read = harness.read(tmp_path)
    rows = read.frame()
    assert len(rows) == 2 * len(harness.read(LOSSES).frame())
    assert {name.partition("-")[0] for name in rows.machine if name} == {"one", "two"}
    assert len(json.loads(read.bencher())) == 2 * len(json.loads(harness.read(LOSSES).bencher()))
    assert all(row["machine"] in row["comparison"] for row in read.figures if row["machine"])


def test_a_suite_is_predicted_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    predicted = harness.predict("smoke", place=["torch/cpu"], budget="10GiB")
    rows = predicted.frame()
    assert list(rows.strategy[:1]) == ["baseline"] and rows.fits.all()
    assert "| baseline" in predicted.markdown()
    with pytest.raises(Refusal, match="there is no suite 'smok'; did you mean 'smoke'"):
        harness.predict("smok")


HERE = Gpu("NVIDIA L4", 20 << 30, 20 << 30, "580.1")


def supposed(monkeypatch: pytest.MonkeyPatch, **named: str) -> Machine:
    """Return the machine that a suite is predicted for on one that has a GPU."""
    machines: list[Machine] = []
    monkeypatch.setattr(door, "of_plan", lambda plan, loaded, names, machine: machines.append(machine) or [])
    monkeypatch.setattr(gpu, "detect", lambda: HERE)
    monkeypatch.setattr(gpu, "usable_bytes", lambda: HERE.usable_bytes)
    harness.predict("gpu", **named)
    return machines[0]


def test_a_suite_is_predicted_for_this_machine_or_for_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = supposed(monkeypatch)
    assert (here.host_bytes, here.device_bytes, here.card) == (facts.total_bytes(), 20 << 30, "NVIDIA L4")
    assert (here.named, here.rates, here.cache) == (frozenset(), {}, cache_folder()), "no times are measured"
    other = supposed(monkeypatch, memory="1GiB", gpu="h200")
    assert (other.host_bytes, other.device_bytes, other.card) == (1 << 30, CARDS["h200"].memory_bytes, "h200")
    assert other.named == {"cpu", "cuda"}
    with pytest.raises(Refusal, match=r"^gpu: there is no card 'h1000'; did you mean 'h100'\?"):
        supposed(monkeypatch, gpu="h1000")


@pytest.mark.parametrize("name", ["budget", "memory", "gpu_memory", "gpu"])
def test_an_empty_text_is_no_size_and_no_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match=r"'' is not a size|there is no card ''"):
        supposed(monkeypatch, **{name: ""})


def row(place: str, limit: int | None = None) -> PlanRow:
    case = Case(workload="decoder", shape={}, place=place, corpus="x", tokenizer="bytes")
    return PlanRow(case, 100, "", None, limit, None)


def test_a_memory_that_is_not_known_is_named_by_arguments() -> None:
    written = door.Predictions(((row("torch/cuda"),), (row("torch/cpu"),))).markdown()
    assert "its memory is not known: give gpu, gpu_memory or budget\n" in written
    assert "its memory is not known: give memory or budget\n" in written


def test_what_the_document_predicts_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_plan(plan: Any, loaded: Any, names: Any, machine: Machine) -> list[list[PlanRow]]:
        return [[row(str(case.place), machine.limit(case)) for case in group.cases] for group in plan.comparisons]

    monkeypatch.setattr(door, "of_plan", of_plan)
    (example,) = re.findall(r"^predicted = (.*)$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE)
    predicted = eval(example, {"harness": harness})
    assert len(predicted) and predicted.fits.notna().all()


def test_a_suite_is_run_and_its_results_are_a_report(made_up: Path, smallest: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(smallest)
    report = harness.run(tmp_path / "small.yaml", results=tmp_path / "results", rounds=0, plugins=[str(made_up)])
    rows = report.frame()
    assert list(rows.strategy) == ["baseline", "checkpoint"]
    assert (rows.peak_bytes == 1 << 20).any()
    asked = heading_of(report.results[0].records).asked
    assert shlex.split(asked) == [str(tmp_path / "small.yaml"), "--plugin", str(made_up), "--rounds", "0"]
    (tmp_path / "small.yaml").write_text(f"{smallest}rounds: 0\n")
    timed = harness.run(tmp_path / "small.yaml", results=tmp_path / "timed", rounds=2, plugins=[str(made_up)])
    assert list(timed.frame().strategy) == ["baseline", "nothing", "checkpoint"], "the control joins its rounds"


@pytest.mark.parametrize("verb", ["run", "predict"])
def test_a_claim_that_names_no_row_is_refused_as_by_the_commands(
    verb: str, smallest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(f'{smallest}claims: [{{id: X, says: so, that: "peak(chekpoint) < 1"}}]\n')
    with pytest.raises(ClaimError, match=r"^small.yaml: claim 'X': there is no row 'chekpoint': mend it"):
        getattr(harness, verb)("small.yaml")
    assert not Path("results").exists(), "before anything is measured"


@pytest.mark.parametrize("rounds", [-1, 101, "3"])
def test_as_many_rounds_as_a_suite_may_have(rounds: Any, smallest: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(smallest)
    with pytest.raises(SuiteError, match=rf"^{rounds!r} rounds cannot be run: ask for 0 to 100$"):
        harness.run(tmp_path / "small.yaml", results=tmp_path / "results", rounds=rounds)
    assert not (tmp_path / "results").exists()


def test_one_place_and_one_plugin_need_no_list(monkeypatch: pytest.MonkeyPatch, smallest: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(smallest)
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    asked: list[Any] = []
    monkeypatch.setattr(door, "of_plan", lambda plan, loaded, names, machine: asked.append((plan.places, names)) or [])
    harness.predict(tmp_path / "small.yaml", place="torch/cpu", plugins=str(plugin))
    assert asked == [((harness.Place("torch", "cpu"),), (str(plugin),))]


def test_the_door_costs_an_author_of_plugins_nothing() -> None:
    code = (
        "import sys, harness; print('pandas' in sys.modules, 'harness.report' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False"] * 3


def test_without_pandas_a_sentence_says_what_to_install(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(frame.FrameError, match=r"install it, or the extra 'frame'"):
        report.frame()


def test_services_get_every_measured_row(report: Any) -> None:
    rows = [row for row in report.figures if row["status"] == "ok" and row["peak_bytes"]]
    bencher = json.loads(report.bencher())
    assert len(bencher) == len(rows) > 10
    for row in rows:
        metrics = bencher[formats.name(row)]
        assert metrics["peak-memory"]["value"] == row["peak_bytes"]
        if row["step_seconds"]:
            latency = metrics["latency"]
            bounds = [latency[name] for name in ("lower_value", "upper_value") if name in latency]
            assert len(bounds) == (0 if row["time_ratio_low"] is None else 2), "no bounds without an interval"
            assert bounds == [] or bounds[0] <= latency["value"] <= bounds[1]
            assert latency["value"] == pytest.approx(row["step_seconds"] * 1e9)
    action = json.loads(report.benchmark_action())
    assert all(isinstance(each["value"], float) and each["unit"] in ("MiB", "ms") for each in action)
    assert sum(each["unit"] == "MiB" for each in action) == len(rows)


def test_parquet_holds_what_the_frame_does(report: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    report.write_parquet(tmp_path / "rows.parquet")
    again = pandas.read_parquet(tmp_path / "rows.parquet")
    assert list(again.strategy) == list(report.frame().strategy)
    with pytest.raises(StoreError, match="name another file"):
        report.write_parquet(tmp_path / "nowhere" / "rows.parquet")


@pytest.mark.slow
@pytest.mark.alone
def test_a_frame_of_100_000_records_takes_less_than_ten_seconds(tmp_path: Path, slowness: float) -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
    line = store.encoded(
        Record(slot=Slot(case="c", kind="time"), case=case, origin=Origin(suite="s", commit="c"),
               times=Times(step_seconds=(0.1, 0.2, 0.3)))
    )  # fmt: skip
    folder = tmp_path / "s" / "machine"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(line * 100_000)
    begun = time.process_time()
    assert len(harness.read(tmp_path).records()) == 100_000
    assert time.process_time() - begun < 10 * slowness
