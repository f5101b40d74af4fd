"""Estimators of others beside our predictions: `tests/benchmarks/estimator_figures.py` with estimators made up here."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "tests/benchmarks/estimator_figures.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))
        spec = importlib.util.spec_from_file_location("estimator_figures", PATH)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def run_of(script: ModuleType, *strategies: str, model: str = "smollm2-135m", **changes: Any) -> Any:
    """Make a row of 100 MiB that was predicted to take 99, and 102 at most."""
    config = {"model_type": "llama", "hidden_size": 64}
    label = " + ".join(strategies) or "baseline"
    sizes = (100 * MIB, 99 * MIB, 102 * MIB)
    return script.Run(model, config, 1000, 1, 512, label, frozenset(strategies), *sizes)._replace(**changes)


def refusing_gpt2(run: Any) -> float:
    if run.model == "gpt2":
        raise ValueError("config.json has no hidden_size")
    return 120.0 * MIB


def test_an_estimator_gets_the_rows_whose_strategies_it_knows(script: ModuleType, capsys: Any) -> None:
    runs = [run_of(script, *each) for each in ([], ["checkpoint"], ["bfloat16"], ["checkpoint", "fused_loss"])]
    known = script.answers(
        script.Estimator("made-up", frozenset({"checkpoint"}), refusing_gpt2), [*runs, run_of(script, model="gpt2")]
    )
    assert [run.label for run, _ in known.priced] == ["baseline", "checkpoint"]
    assert [run.model for run in known.refused] == ["gpt2"]
    assert "made-up refuses gpt2: config.json has no hidden_size" in capsys.readouterr().err


def test_its_errors_stand_beside_ours_on_the_same_rows(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    estimators = [script.Estimator(name, frozenset({"checkpoint"}), refusing_gpt2) for name in ("made-up", "absent")]
    monkeypatch.setattr(script, "ESTIMATORS", estimators)
    monkeypatch.setattr(script, "version", {"made-up": "1.2", "absent": None}.get)
    runs = [
        run_of(script),
        run_of(script, "checkpoint", peak_bytes=150 * MIB, at_most_bytes=None),
        run_of(script, "fused_loss", peak_bytes=110 * MIB),
        run_of(script, model="gpt2"),
    ]
    text = script.written(runs, [script.answers(estimators[0], runs)])
    assert "by made-up 1.2. Not installed there: absent." in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    theirs, ours = ["2 of 4", "20.0%", "20.0%", "20.0%", "50%"], ["17.5%", "34.0%", "34.0%", "100%", "2.0%", "0%"]
    assert ["`made-up`", *theirs, *ours] in rows
    assert ["`checkpoint`", "512", "1", "-34.0%", "-20.0%"] in rows
    assert ["`fused_loss`", "512", "1", "-10.0%", ""] in rows, "it cannot price this one"
    assert "All 4 rows" in text and "Of 3 it was said" in text and ": 33% took more" in text
    assert text.endswith("- rows that `made-up` refuses besides: 1, of gpt2")


def test_without_any_estimator_our_own_errors_are_written(script: ModuleType) -> None:
    text = script.written([run_of(script)], [])
    assert "by none of them. Not installed there: fitcheck-llm, canifinetune, gpu-estimator, accelerate." in text
    assert "All 1 rows" in text


def test_the_tables_go_between_the_marks(script: ModuleType, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    document = tmp_path / "ESTIMATORS.md"
    document.write_text("before\n<!-- generated: estimators -->\nold\n<!-- end: estimators -->\nafter\n", "utf-8")
    monkeypatch.setattr(script, "DOCUMENT", document)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "ESTIMATORS", ())
    monkeypatch.setattr(script, "measured", lambda folder: iter([run_of(script)]))
    monkeypatch.setattr(sys, "argv", [str(PATH), "--write"])
    script.main()
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert capsys.readouterr().out.strip() in text


def test_the_rows_are_those_of_the_results(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    from harness.workloads import causal_lm

    monkeypatch.setattr(causal_lm, "parameters", lambda shape: 1000)
    runs = list(script.measured(ROOT / "results"))
    assert len(runs) > 150 and {run.tokens for run in runs} == {512, 1024}
    assert all(run.predicted_bytes and run.config["model_type"] for run in runs)
    assert {run.model for run in runs if run.eager} == {"gemma-2-2b", "gemma-2-9b"}
    assert {run.precision for run in runs if "bfloat16" in run.label} == {"bf16"}


def test_fitcheck_reads_the_row_instead_of_the_hub(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it adds for a driver is taken off."""
    parser = ModuleType("fitcheck.config_parser")
    parser.hf_hub_download = parser.HfApi = None  # type: ignore[attr-defined]
    asked: list[Any] = []

    def fetched(model: str) -> tuple[str, int]:
        path = parser.hf_hub_download(repo_id=model, filename="config.json", token=None)
        info = parser.HfApi(token=None).model_info(model, expand=["safetensors"])
        return json.loads(Path(path).read_text(encoding="utf-8"))["model_type"], info.safetensors.total

    def estimated(config: Any, training: Any, card: Any) -> Any:
        asked.append((config, training))
        return SimpleNamespace(total_mib=620.0, overhead_mib=520.0)

    fitcheck = SimpleNamespace(
        fetch_model_config=fetched, TrainingConfig=dict, estimate=estimated, get_gpu=lambda name: name
    )
    monkeypatch.setitem(sys.modules, "fitcheck", fitcheck)
    monkeypatch.setitem(sys.modules, "fitcheck.config_parser", parser)
    assert script.of_fitcheck(run_of(script, "checkpoint")) == 100 * MIB
    ((config, training),) = asked
    assert config == ("llama", 1000) and parser.HfApi is None
    assert training["precision"] == "fp32" and training["grad_checkpoint"] and training["flash_attn"]
    assert training["lora_rank"] is None and (training["batch_size"], training["seq_len"]) == (1, 512)


def test_canifinetune_reads_the_row_instead_of_the_hub(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it adds for a driver and as a margin is taken off."""
    models = ModuleType("canifinetune.estimator.model_metadata")
    models.fetch_model_config = models.fetch_model_parameter_count = None  # type: ignore[attr-defined]

    def estimated(request: Any) -> Any:
        assert models.fetch_model_config(request["model_id"], revision="main")["model_type"] == "llama"
        assert models.fetch_model_parameter_count(request["model_id"], revision="main") == 1000
        assert request["base_dtype"] == "bf16" and request["attention_implementation"] == "eager"
        return SimpleNamespace(
            memory=SimpleNamespace(total_estimated_gb=11.5, cuda_overhead_gb=6.5, safety_margin_gb=4.0)
        )

    estimator = SimpleNamespace(EstimateRequest=dict, estimate=estimated)
    monkeypatch.setitem(sys.modules, "canifinetune.estimator", estimator)
    monkeypatch.setitem(sys.modules, "canifinetune.estimator.model_metadata", models)
    capped = run_of(script, "bfloat16", config={"model_type": "llama", "attn_logit_softcapping": 50.0})
    assert script.of_canifinetune(capped) == 1 << 30
