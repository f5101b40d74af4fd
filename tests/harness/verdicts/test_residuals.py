"""Which measured cases bounds of predictions may rest on: `tests/benchmarks/residual_figures.py` on small records."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness import Place
from harness.contract import plugins
from harness.machine import facts
from harness.records import Applied, Case, Fit, Memory, Origin, Prediction, Record, Slot, Trial, store
from harness.verdicts.bound import Kind, Residual
from harness.worker.prediction import GUESSED

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "residual_figures.py"
MIB = 1 << 20
CASE = Case(workload="decoder", shape={"tokens": 64}, place="jax/cpu", corpus="zipf", tokenizer="bytes")
PLAIN = Kind("jax/cpu", several=False, data=False, lower=False, attention=False)
LOADED = plugins.load()


PUBLISHED = PATH.parent / "published" / "rows.jsonl"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("residual_figures", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What predicts published training runs: all of them to take 1 GiB."""
    monkeypatch.syspath_prepend(str(PATH.parent))
    module = importlib.import_module("published.training")
    monkeypatch.setattr(module, "predicted", lambda row: {"allocated_bytes": 1 << 30, "reserved_bytes": 2 << 30})
    return module


def records_of(name: str = "", predicted: "int | None" = 100 * MIB, place: str = "jax/cpu", **run: Any) -> list[Record]:
    """Make the prediction of a case, and its run with a peak of 110 MiB; `run` changes the record of the run."""
    applied = (Applied(name=name),) if name else ()
    case = CASE.model_copy(update={"strategies": applied, "place": Place(*place.split("/"))})
    prediction = Prediction(predicted_peak_bytes=predicted, predicted_phase="steady_step/loss")
    measured: dict[str, Any] = {"memory": Memory(peak_host_bytes=110 * MIB, losses=(6.0, 5.9))}
    common: dict[str, Any] = {"case": case, "origin": Origin(suite="small", commit="abc")}
    return [
        Record(slot=Slot(case=case.digest(), kind="predict"), prediction=prediction, **common),
        Record(slot=Slot(case=case.digest(), kind="memory"), **(common | measured | run)),
    ]


@pytest.fixture
def residuals(figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(figures, "is_since", lambda since, commit: commit != "old")

    def of(*records: Record) -> list[Residual]:
        path = tmp_path / "results" / "small" / "machine" / "1.jsonl"
        path.parent.mkdir(parents=True)
        for record in records:
            store.append(path, record)
        rows = figures.measured([tmp_path / "results"], LOADED.aliases)
        return [each for _, each in figures.with_residual(rows, LOADED)]

    return of


def test_a_measured_case_counts_with_its_prediction(residuals: Any) -> None:
    assert residuals(*records_of()) == [Residual(PLAIN, 100 * MIB, 110 * MIB)]


def test_the_peak_is_that_of_the_process_alone(residuals: Any) -> None:
    children: dict[str, Any] = {
        "child_peak_bytes": 1 * MIB,
        "child_peak_bound_bytes": 900 * MIB,
        "flags": ("child_processes",),
    }
    (one,) = residuals(*records_of(**children))
    assert one.measured_bytes == 110 * MIB


@pytest.mark.parametrize(
    "records",
    [
        records_of(predicted=None),
        records_of(name="nobody"),
        records_of(status="oom_budget"),
        records_of(flags=("unsettled",)),
        records_of(flags=("lower_bound",)),
    ],
    ids=["not predicted", "no such strategy", "out of memory", "not settled", "died before"],
)
def test_without_a_prediction_or_a_peak_to_be_believed_a_case_does_not_count(residuals: Any, records: Any) -> None:
    assert residuals(*records) == []


def test_doubts_about_time_are_no_doubts_about_memory(residuals: Any) -> None:
    assert len(residuals(*records_of(flags=("noisy", "file_backed")))) == 1


@pytest.mark.parametrize(
    "room",
    [
        {"trial": Trial(predicted_peak_bytes=100 * MIB, predicted_phase="steady_step/loss", peak_bytes=110 * MIB)},
        {"limits": Fit(over="tokens", budget_bytes=110 * MIB)},
    ],
    ids=["trial", "search"],
)
def test_what_ran_within_its_own_prediction_does_not_count(residuals: Any, room: dict[str, Any]) -> None:
    """Cases that needed more ended without a peak: what is left of a trial is never short."""
    assert residuals(*records_of(), Record(case=CASE, origin=Origin(suite="small", commit="abc"), **room)) == []


@pytest.mark.parametrize("place", ["torch/cpu", "jax/cpu"])
def test_old_peaks_of_steps_are_above_another_base(residuals: Any, figures: ModuleType, place: str) -> None:
    step = PLAIN._replace(place=place)
    assert not figures.counts(step, "old") and figures.counts(step, "abc")
    assert figures.counts(step._replace(several=True), "old") and figures.counts(step._replace(data=True), "old")
    assert figures.counts(step._replace(place="jax/cuda"), "old")
    assert residuals(*records_of(place=place, origin=Origin(suite="small", commit="old"))) == []


def test_a_case_is_predicted_anew_over_the_steps_of_its_run(figures: ModuleType, monkeypatch: Any) -> None:
    asked: list[int] = []

    def predicted(cases: Any, *_: Any, steps: int, **settings: Any) -> Any:
        asked.append(steps)
        for case in cases:
            yield case, Record(case=case, prediction=Prediction(predicted_peak_bytes=steps * MIB))

    monkeypatch.setattr(figures.prediction_cache.predictions, "of_cases", predicted)
    monkeypatch.setattr(figures.prediction_cache, "folder", lambda cache: None)
    monkeypatch.setattr(figures.history, "changed", lambda commit, files: ("harness/backends/jax.py",))
    here = figures.processor_of(facts.facts())
    rows = [figures.Measured(CASE, "abc", 110 * MIB, steps, Prediction(), here) for steps in (3, 24)]
    anew = figures.predicted_anew(rows, LOADED)
    assert asked == [3, 24]
    assert [row.prediction.predicted_peak_bytes for row in anew] == [3 * MIB, 24 * MIB]


@pytest.mark.parametrize("changed", [("strategies/activations/checkpoint/__init__.py",), None])
def test_a_strategy_that_has_changed_keeps_the_prediction_of_its_run(
    figures: ModuleType, monkeypatch: Any, changed: Any
) -> None:
    def predicted(cases: Any, *_: Any, **settings: Any) -> Any:
        yield from ((case, Record(case=case, prediction=Prediction(predicted_peak_bytes=MIB))) for case in cases)

    monkeypatch.setattr(figures.prediction_cache.predictions, "of_cases", predicted)
    monkeypatch.setattr(figures.prediction_cache, "folder", lambda cache: None)
    monkeypatch.setattr(figures.history, "changed", lambda commit, files: changed)
    monkeypatch.setattr(figures.history, "files_of", lambda strategies: ("strategies/activations/checkpoint",))
    here, known = figures.processor_of(facts.facts()), Prediction(predicted_peak_bytes=100 * MIB)
    row = figures.Measured(CASE, "abc", 110 * MIB, 3, known, here)
    assert figures.predicted_anew([row], LOADED) == [row]


@pytest.mark.parametrize(("supposed", "peak"), [("the values decide", 100 * MIB), (GUESSED, MIB), (None, MIB)])
def test_a_case_whose_values_are_not_read_keeps_the_prediction_of_its_run(
    figures: ModuleType, monkeypatch: Any, supposed: str | None, peak: int
) -> None:
    def predicted(cases: Any, *_: Any, **settings: Any) -> Any:
        notes = {} if supposed is None else {"prediction": supposed}
        for case in cases:
            yield case, Record(case=case, notes=notes, prediction=Prediction(predicted_peak_bytes=MIB))

    monkeypatch.setattr(figures.prediction_cache.predictions, "of_cases", predicted)
    monkeypatch.setattr(figures.prediction_cache, "folder", lambda cache: None)
    monkeypatch.setattr(figures.history, "changed", lambda commit, files: ())
    here, known = figures.processor_of(facts.facts()), Prediction(predicted_peak_bytes=100 * MIB)
    row = figures.Measured(CASE, "abc", 110 * MIB, 3, known, here)
    [anew] = figures.predicted_anew([row], LOADED)
    assert anew.prediction.predicted_peak_bytes == peak
    elsewhere = row._replace(processor=figures.processor_of({"cpu": "another", "half_precision": ["amx_bf16"]}))
    assert figures.predicted_anew([elsewhere], LOADED) == [elsewhere], "libraries take other scratch there"


def test_published_training_runs_count_by_their_allocated_bytes(figures: ModuleType, training: Any) -> None:
    rows = [json.loads(text) for text in PUBLISHED.read_text(encoding="utf-8").splitlines()]
    known = list(figures.of_published(PUBLISHED))
    assert len(known) == 43, "no operators alone, and no processes of which the driver counted all"
    assert {each.kind for each in known} == {Kind("torch/cuda", False, False, lower=True, attention=False)}
    assert {each.predicted_bytes for each in known} == {1 << 30}
    assert {each.measured_bytes for each in known} < {row["measured"].get("max_memory_allocated") for row in rows}


@pytest.mark.parametrize(
    ("dtype", "autocast", "lower"),
    [("float32", None, False), ("float32", "bf16", True), ("float16 (base)", None, True)],
)
def test_a_published_run_is_of_lower_precision_by_its_types(
    figures: ModuleType, training: Any, tmp_path: Path, dtype: str, autocast: "str | None", lower: bool
) -> None:
    row = json.loads(PUBLISHED.read_text(encoding="utf-8").splitlines()[0])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"param_dtype": dtype, "autocast": autocast}) + "\n", encoding="utf-8")
    (one,) = figures.of_published(path)
    assert one.kind.lower == lower


def test_a_published_run_that_cannot_be_rebuilt_does_not_count(
    figures: ModuleType, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(row: dict[str, Any]) -> dict[str, int]:
        raise training.Refused("its card is not known")

    monkeypatch.setattr(training, "predicted", refused)
    assert list(figures.of_published(PUBLISHED)) == []


def test_published_runs_are_written_beside_our_own(
    figures: ModuleType, training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "small" / "machine" / "1.jsonl"
    path.parent.mkdir(parents=True)
    for record in records_of():
        store.append(path, record)
    written = tmp_path / "residuals.json"
    options = [str(tmp_path / "results"), "--published", str(PUBLISHED), "--write", str(written)]
    monkeypatch.setattr(sys, "argv", [str(PATH), *options])
    monkeypatch.setattr(figures, "is_since", lambda since, commit: True)
    assert figures.main() == 0
    places = [kind[0] for kind, *_ in json.loads(written.read_text(encoding="utf-8"))["residuals"]]
    assert places.count("jax/cpu") == 1 and places.count("torch/cuda") == len(places) - 1 > 30
