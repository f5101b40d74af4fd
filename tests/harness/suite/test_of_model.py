"""A model on the command line is a suite that can be kept."""

import json
import math
import re

import pytest

from harness.cli.inputs import Cases
from harness.contract import plugins
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.suite.of_model import Model, row
from harness.workloads.causal_lm import configs

LOADED = plugins.load()


def test_a_model_with_rows_is_a_suite(tmp_path):
    model = Model("qwen3-8b", 32768, 2, ("checkpoint,fused_loss(chunk=64)", "bfloat16"))
    plan = reader.read(tmp_path / "qwen3-8b.yaml", LOADED, model.suite(["torch/cuda"]))
    assert [case.label for case in plan.cases] == [
        "baseline",
        "checkpoint + fused_loss(chunk=64)",
        "bfloat16",
    ]
    shape = plan.cases[0].shape
    assert (shape["config"], shape["tokens"], shape["batch"], shape["layers"]) == ("qwen3-8b", 32768, 2, 36)
    assert model.stem == "qwen3-8b" and str(plan.cases[0].place) == "torch/cuda"


def test_a_model_may_be_named_as_its_repository_is(capsys):
    plan = Cases(model="Qwen/Qwen3-0.6B", place=["torch/cpu"]).plan(LOADED)
    assert {case.shape["config"] for case in plan.cases} == {"qwen3-0.6b"} and plan.name == "qwen3-0.6b"
    assert plan.cases[-1].label == "bfloat16 + qlora + checkpoint + fused_loss", "what most take in the end"
    assert 'preset: "qwen3-0.6b"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "label",
    [
        "lora(rank=8, targets=q_proj,v_proj) + checkpoint",
        "lora(targets=q_proj,v_proj, rank=8)",
        "mapped_moments(folder=/mnt/an-ssd, elements=1000)",
        "fused_loss(chunk=64)",
    ],
)
def test_a_row_is_read_as_a_table_writes_it(tmp_path, label):
    model = Model("qwen3-8b", rows=(label.replace(" + ", ","),))
    plan = reader.read(tmp_path / "suite.yaml", LOADED, model.suite(["torch/cpu"]))
    assert [case.label for case in plan.cases] == ["baseline", label]


def test_a_path_is_named_for_the_folder_of_its_file(tmp_path):
    folder = tmp_path / "my gpt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs.read("gpt2")))
    model = Model(str(folder / "config.json"))
    assert model.stem == "my-gpt"
    plan = reader.read(tmp_path / "suite.yaml", LOADED, model.suite(["torch/cpu"]))
    assert plan.cases[0].shape["tokens"] == 1024, "no more than it has positions"
    assert plan.cases[0].shape["config"] == configs.read("gpt2")


def test_a_model_is_trained_on_texts_and_evaluated_where_that_is_asked_for(tmp_path, capsys):
    cases = Cases(model="gpt2", tokens=256, batch=4, documents=64, evaluations=2, rows=["packed"], place=["torch/cpu"])
    plan = cases.plan(LOADED)
    case = plan.cases[0]
    assert (case.workload, case.corpus) == ("causal_lm_documents", "standard_library")
    assert {name: case.shape[name] for name in ("documents", "evaluations", "longer")} == {
        "documents": 64,
        "evaluations": 2,
        "longer": "skip",
    }
    written = capsys.readouterr().out.removeprefix("```yaml\n").partition("```")[0]
    again = reader.read(tmp_path / "gpt2.yaml", LOADED, written)
    assert [each.digest() for each in again.cases] == [each.digest() for each in plan.cases]
    asked = "--model gpt2 --tokens 256 --batch 4 --documents 64 --evaluations 2"
    assert plan.asked == f"{asked} --with packed"


@pytest.mark.parametrize(("batch", "rows", "asked"), [(None, 8, ""), (8, 8, "--batch 8 "), (16, 16, "--batch 16 ")])
def test_a_model_on_ranks_has_a_row_for_each_if_nothing_else_is_said(batch, rows, asked):
    plan = Cases(model="gpt2", tokens=256, batch=batch, ranks=8, place=["torch/cuda"]).plan(LOADED)
    on = {case.label: (case.ranks, case.shape["batch"]) for case in plan.cases}
    assert on.pop("baseline") == (1, rows) and set(on.values()) == {(8, rows)}
    assert "fsdp + checkpoint + fused_loss" in {label.partition(" on ")[0] for label in on}
    assert plan.asked == f"--model gpt2 --tokens 256 {asked}--ranks 8"


@pytest.mark.parametrize("option", ["documents", "evaluations", "ranks"])
def test_sizes_of_a_model_need_one(option):
    with pytest.raises(SuiteError, match=f"--{option} goes with --model: a suite says it itself"):
        Cases(**{option: 2}).plan(LOADED)


def test_whoever_names_a_strategy_allows_its_answers():
    rows = ["lora(targets=q_proj,v_proj),checkpoint", "bfloat16"]
    assert Cases(model="gpt2", rows=rows).answers(LOADED) == sorted(
        {LOADED.strategies[name].declares for name in ("lora", "bfloat16")}
    )
    assert Cases(model="gpt2", rows=["documents"]).answers(LOADED) == ["approximate"], "a former name"
    assert Cases(model="gpt2").answers(LOADED) == []


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("models/Llama-3.1-8B", "Llama-3.1-8B"),
        ("models/Llama-3.1-8B/config.json", "Llama-3.1-8B"),
        ("models/my.other.json", "my.other"),
        ("models/linked/config.json", "linked"),
        ("..", "here"),
        (".", "inner"),
        ("../config.json", "here"),
        ("config.json", "inner"),
        ("gpt2", "gpt2"),
    ],
)
def test_every_model_of_a_folder_has_a_name_of_its_own(tmp_path, monkeypatch, name, stem):
    inner = tmp_path / "here" / "inner"
    for folder in (inner / "models" / "Llama-3.1-8B", inner / "models" / "linked"):
        folder.mkdir(parents=True)
    (inner / "models" / "Llama-3.1-8B" / "config.json").touch()
    (inner / "models" / "my.other.json").touch()
    (inner / "models" / "linked" / "config.json").symlink_to(inner / "models" / "my.other.json")
    monkeypatch.chdir(inner)
    assert Model(name).stem == stem


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is no list of strategies"),
        ("a,,b", "is no list of strategies"),
        ("a(b)", "'b' in 'a(b)' sets no knob"),
        ("a(b=1,)", "'' in 'a(b=1,)' sets no knob"),
        ("a(b=my value)", "'my value' in 'a(b=my value)' is no value"),
    ],
)
def test_a_row_that_is_none_is_refused(text, sentence):
    with pytest.raises(SuiteError) as error:
        row(text)
    assert sentence in str(error.value)


def test_values_may_be_written_as_in_python():
    assert row("tiled_feed(recompute=False)") == "{tiled_feed: {recompute: false}}"
    assert row("lora(targets='q_proj,v_proj', rank=4)") == '{lora: {targets: "q_proj,v_proj", rank: 4}}'


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gpt2-xxl", "gpt2-xl"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("openai/gpt2-x", "gpt2-xl")],
)
def test_a_model_that_is_not_there_is_refused(name, hint):
    with pytest.raises(SuiteError, match=f"no file '{name}'.*; did you mean '{hint}'"):
        Model(name).suite(["torch/cpu"])


@pytest.mark.parametrize("name", sorted(configs.published()))
def test_each_published_model_is_known_by_its_name_on_the_hub(name):
    source = configs.published()[name]["source"]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", source) and configs.named(source) == name


def test_more_tokens_than_a_model_has_positions_are_refused_with_what_to_write():
    with pytest.raises(
        SuiteError, match="131,072 are more than the 40,960 positions of qwen3-8b: give at most"
    ) as error:
        Model("qwen3-8b", tokens=131072).suite(["torch/cpu"])
    assert "changes: {max_position_embeddings: 131072}" in str(error.value)
    with pytest.raises(SuiteError, match=r"changes: \{n_positions: 2048\}"):
        Model("gpt2", tokens=2048).suite(["torch/cpu"])
    assert "tokens: 40960" in Model("qwen3-8b", tokens=40960).suite(["torch/cpu"])


@pytest.mark.parametrize("supposed", [True, False])
def test_a_gpu_is_supposed_where_something_is_on_one(tmp_path, supposed):
    suite = tmp_path / "mine.yaml"
    suite.write_text("title: Mine\nworkload: decoder\nstrategies: [checkpoint]\n")
    for cases in (Cases(path=suite), Cases(model="gpt2", place=["torch/cpu"])):
        if not supposed:
            assert cases.plan(LOADED, on_gpu=supposed).cases
            continue
        with pytest.raises(SuiteError, match="a GPU is named, and no case is on one: name torch/cuda among the places"):
            cases.plan(LOADED, on_gpu=supposed)
    with pytest.raises(SuiteError, match="it has no place 'torch/cuda': add it to `places`"):
        Cases(path=suite, place=["torch/cuda"]).plan(LOADED)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_configuration_with_a_number_that_is_not_finite_is_refused(tmp_path, number):
    (tmp_path / "config.json").write_text(json.dumps(configs.read("gpt2") | {"time_step_limit": [0.0, number]}))
    with pytest.raises(SuiteError, match=r"line 5: shape\.config\.time_step_limit\.1: a number that is not finite"):
        reader.read(tmp_path / "suite.yaml", LOADED, Model(str(tmp_path)).suite(["torch/cpu"]))
