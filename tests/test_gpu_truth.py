"""Published GPU runs are predicted without a GPU, and what cannot be rebuilt says why."""

import importlib.util
import json
import warnings
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.records import store
from harness.run import predictions

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests/benchmarks/gpu_truth.py"
ROWS = {
    row["id"]: row
    for row in map(json.loads, (ROOT / "tests/benchmarks/published/rows.jsonl").read_text("utf-8").splitlines())
}


@pytest.fixture(scope="module")
def main():
    """The script within this process: another one imports torch first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec = importlib.util.spec_from_file_location("gpu_truth", SCRIPT)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        yield script.main


@pytest.fixture
def predicted(main, tmp_path, capsys):
    def predicted(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        with warnings.catch_warnings(action="ignore"):
            main([str(tmp_path / "rows.jsonl")])
        return {line["id"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}

    return predicted


@pytest.mark.long
def test_published_operators_are_met_to_what_their_rounding_leaves(predicted):
    rows = [row for row in ROWS.values() if row["family"] == "liger-op"]
    assert len(rows) >= 10
    for name, line in predicted(rows).items():
        assert line["allocated_bytes"] == pytest.approx(ROWS[name]["measured"]["max_memory_allocated"], abs=2048), name


def test_lines_that_are_no_rows_are_refused_and_blank_ones_passed_over(main, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('\n[1, 2]\n{"id": "far", "family": "somebody"}\nno json\n', encoding="utf-8")
    main([str(tmp_path / "rows.jsonl")])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == [None, "far", None] and all(line["refused"] for line in lines)


def test_what_cannot_be_rebuilt_says_why(predicted):
    one = next(row for row in ROWS.values() if row["family"] == "liger-op")
    rows = [
        {"id": "far", "family": "somebody", "gpu": "T4"},
        one | {"id": "card", "gpu": "Voodoo 2"},
        one | {"id": "operator", "model": "op:jsd"},
        one | {"id": "kernel", "op_config": one["op_config"] | {"variant": "cce"}},
        one | {"id": "small", "gpu": "Tesla T4", "gpu_total": 1 << 28},
    ]
    lines = predicted(rows)
    assert "say too little" in lines["far"]["refused"]
    assert "'Voodoo 2' is not known" in lines["card"]["refused"]
    assert "no plain form of 'jsd'" in lines["operator"]["refused"]
    assert "kernel of its own" in lines["kernel"]["refused"]
    assert "out of memory" in lines["small"]["refused"] and lines["small"]["oom"]
    assert not any("allocated_bytes" in line for line in lines.values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the extra models is not installed")
def test_a_published_adapter_run_is_met_to_the_byte(predicted):
    (line,) = predicted([ROWS["fitcheck-060"]]).values()
    measured = ROWS["fitcheck-060"]["measured"]
    assert line["allocated_bytes"] == measured["max_memory_allocated"]
    assert line["process_bytes"] == pytest.approx(measured["process"], rel=0.01)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the extra models is not installed")
def test_published_processes_are_met_to_a_percent_and_bounded(predicted):
    names = ["xmem-002", "xmem-014", "xmem-028", "xmem-031", "xmem-041"]
    lines = predicted([ROWS[name] for name in names])
    assert "out of memory" in lines.pop("xmem-041")["refused"], "it ran out of memory there too"
    for name, line in lines.items():
        measured = ROWS[name]["measured"]["nvml_max_minus_first"]
        assert line["process_bytes"] == pytest.approx(measured, rel=0.01), name
        assert measured <= line["at_most_bytes"] <= 1.2 * measured, name


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the extra models is not installed")
def test_where_gradients_are_dropped_decides_what_a_process_takes(predicted):
    """The row does not say where, so that its bound has the most of all ways."""
    row = ROWS["xmem-030"]
    ways = {
        way: row | {"id": way, "steps": f"4 iterations; zero_grad {way}"} for way in ("before forward", "after forward")
    }
    lines = predicted([row, *ways.values()])
    assert lines["after forward"]["process_bytes"] > 1.1 * lines["before forward"]["process_bytes"]
    assert lines["xmem-030"]["process_bytes"] == lines["before forward"]["process_bytes"]
    assert lines["xmem-030"]["at_most_bytes"] > lines["after forward"]["process_bytes"]


OWN = sorted((ROOT / "results").glob("*/*/*.jsonl"))


@pytest.mark.long
def test_our_own_runs_on_a_gpu_are_met_to_a_thousandth():
    """Allocated bytes of every row in torch, and segments to a twentieth, for the card that ran it."""
    measured = {
        record.case.digest(): record
        for file in OWN
        if b'"torch/cuda"' in file.read_bytes()
        for record in store.read(file)[0]
        if record.slot is not None and record.slot.kind == "memory" and record.memory.reserved_device_bytes
    }
    assert len(measured) >= 20
    cards = {record.origin.machine["gpu"].split(",")[0] for record in measured.values()}
    assert cards == {"NVIDIA H200"}
    cases = [record.case for record in measured.values()]
    unseen = 0
    for case, record in predictions.of_cases(cases, {}, plugins.load(), card="NVIDIA H200", steps=2):
        memory, figures = measured[case.digest()].memory, record.prediction
        if figures.predicted_peak_bytes is None:
            unseen += 1
            continue
        assert figures.predicted_peak_bytes == pytest.approx(memory.peak_device_bytes, rel=1e-3), case.label
        above_base = figures.predicted_reserved_bytes - figures.predicted_base_bytes
        assert above_base == pytest.approx(memory.reserved_device_bytes, rel=0.05), case.label
    assert unseen <= 2, "kernels of Liger's and of Apple's are their own"
