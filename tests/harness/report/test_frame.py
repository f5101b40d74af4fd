"""Frames as files and frames of predictions, made of figures that no committed results have together."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.records import Case, Fit, Heading, Memory, Prediction, Record, Slot, Times, Trial
from harness.report import frame
from harness.verbs.plan import PlanRow

pandas = pytest.importorskip("pandas", reason="needs the package pandas")


def causal_lm(config: Any, **sizes: Any) -> dict[str, Any]:
    return {"strategy": "baseline", "rank_peaks": [], "shape": {"config": config, "changes": {}, **sizes}}


def written(folder: Path, *rows: dict[str, Any]) -> Any:
    """Write rows as parquet and read them again."""
    pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    frame.write_parquet(rows, folder / "rows.parquet")
    return pandas.read_parquet(folder / "rows.parquet")


def test_models_without_changes_are_written_as_parquet(tmp_path: Path) -> None:
    rows = written(tmp_path, causal_lm("qwen3-4b"), causal_lm("gpt2"))
    assert list(rows["shape.config"]) == ["qwen3-4b", "gpt2"]
    assert rows["shape.changes"].isna().all() and rows.rank_peaks.isna().all()


def test_what_is_nested_is_json_beside_plain_text(tmp_path: Path) -> None:
    config, layers = {"model_type": "llama", "layers": {"kinds": ["full"]}}, [{"kind": "full"}, {"kind": "window"}]
    rows = written(tmp_path, causal_lm("qwen3-4b", layers=[]), causal_lm(config, layers=layers))
    assert rows["shape.config"][0] == "qwen3-4b" and json.loads(rows["shape.config"][1]) == config
    assert rows["shape.layers"].isna()[0] and json.loads(rows["shape.layers"][1]) == layers


def test_lists_of_numbers_stay_lists(tmp_path: Path) -> None:
    rows = written(tmp_path, {"rank_peaks": [1, 2]}, {"rank_peaks": []})
    assert list(rows.rank_peaks[0]) == [1, 2] and rows.rank_peaks[1] is None


def test_a_column_of_several_kinds_is_refused_in_a_sentence_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(frame.FrameError, match=r"parquet cannot hold these rows .*shape.window.*: write them as csv"):
        written(tmp_path, {"shape": {"window": "whole"}}, {"shape": {"window": 64}})
    assert not list(tmp_path.iterdir())


def test_a_number_beyond_64_bits_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(frame.FrameError, match=r"parquet cannot hold these rows .*: write them as csv"):
        written(tmp_path, {"peak_bytes": 10**30})


def test_a_frame_of_predictions_has_what_decides_whether_a_case_fits() -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
    forecast = Prediction(predicted_peak_bytes=100, at_most_bytes=250)
    rows = frame.of_predictions([[PlanRow(case, 100, "loss", 1, 200, None, prediction=forecast)]])
    assert (rows.peak_bytes[0], rows.at_most_bytes[0], rows.need_bytes[0], rows.limit_bytes[0]) == (100, 250, 250, 200)
    assert not rows.fits[0]
    assert rows.reserved_bytes[0] is None and rows.gpu[0] is None
    sizes = {"predicted_reserved_bytes": 300, "predicted_driver_bytes": 700, "predicted_host_bytes": 50}
    forecast = Prediction(predicted_peak_bytes=100, parameters=12, **sizes)
    on_gpu = PlanRow(case, 100, "loss", 1, 200, None, prediction=forecast, supposed="an H100", host_limit_bytes=90)
    (row,) = frame.of_predictions([[on_gpu]]).to_dict("records")
    assert (row["reserved_bytes"], row["driver_bytes"], row["host_bytes"], row["host_limit_bytes"]) == (
        300,
        700,
        50,
        90,
    )
    assert (row["parameters"], row["gpu"]) == (12, "an H100")


def test_a_record_has_the_budget_of_its_case_and_the_figures_of_its_room() -> None:
    case = Case(workload="decoder", shape={}, place="torch/cpu", corpus="x", tokenizer="bytes", budget_bytes=1 << 30)
    timed = Record(slot=Slot(case="c", kind="time"), case=case, times=Times(step_seconds=(0.1,)))
    trial = Trial(predicted_peak_bytes=100, at_most_bytes=150, at_point="oom_budget", at_most="ok", peak_bytes=120)
    rows = frame.of_records([timed, Record(case=case, trial=trial)])
    assert list(rows.budget_bytes) == [1 << 30] * 2
    assert (rows.at_point[1], rows.predicted_peak_bytes[1], rows.peak_bytes[1]) == ("oom_budget", 100, 120)


def test_a_timed_record_has_its_steps_and_their_median() -> None:
    timed = Record(slot=Slot(case="c", kind="time"), times=Times(step_seconds=(0.1, 0.9, 0.2)))
    rows = frame.of_records([timed])
    assert (rows.median_step_seconds[0], list(rows.step_seconds[0])) == (0.2, [0.1, 0.9, 0.2])


def test_the_runs_of_a_search_are_rows_beside_what_it_gave() -> None:
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="x", tokenizer="bytes")
    ran = Record(case=case, memory=Memory(peak_host_bytes=5))
    limit = Record(case=case, limits=Fit(over="tokens", budget_bytes=9, passed=64))
    rows = frame.of_records([Record(heading=Heading(title="the longest")), ran, limit])
    assert (len(rows), rows["peak_host_bytes"][0], rows["passed"][1]) == (2, 5, 64)


def test_what_a_record_has_not_is_missing_and_its_children_are_there() -> None:
    slot = Slot(case="c", kind="memory")
    first = Record(slot=slot, child_peak_bytes=3, child_peak_bound_bytes=5, memory=Memory(peak_host_bytes=7))
    second = first.model_copy(update={"origin": first.origin.model_copy(update={"attempt": 2})})
    rows = frame.of_records([first, second, Record(slot=Slot(case="c", kind="predict"))])
    assert list(rows.stands) == [False, True, True] and list(rows.attempt) == [1, 2, 1]
    assert (rows.child_peak_bytes[0], rows.child_peak_bound_bytes[0]) == (3, 5)
    assert rows.loc[2, ["feeds", "child_peak_bytes", "peak_host_bytes"]].isna().all()
    timed = Record(slot=Slot(case="c", kind="time"), times=Times(step_seconds=(0.1,)))
    rows = frame.of_records([timed, first])
    assert rows.rest_seconds[0] == 0 and rows.isna().rest_seconds[1] and rows.isna().fetch_seconds[0]
