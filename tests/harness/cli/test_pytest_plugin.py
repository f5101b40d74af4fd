"""Suites as tests of pytest-benchmark, run as another project runs them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli import pytest_plugin
from harness.records import Case, Record, Times
from harness.verdicts.judge import Row

SUITE = """
title: Small
workload: decoder
places: [torch/cpu]
corpus: zipf
shape: {layers: 1, width: 128, heads: 2, vocabulary: 8000, batch: 2, tokens: 128}
strategies: [checkpoint, jax_vmap]
rounds: 1
warmup: 1
steps: 3
"""
CLAIMED = SUITE + 'claims: [{id: X, says: so, that: "peak(chekpoint) < 1"}]\n'
WRONG = '''
"""Forget the last token; keep nothing."""

from dataclasses import replace

from harness import Strategy, hookimpl


def on_torch(parts):
    inner = parts.loss
    return replace(parts, loss=lambda parts, x, w, y: inner(parts, x[:, :-1], w, y[:, :-1]))


@hookimpl
def harness_strategies():
    return [Strategy("forgetful", ("loss",), {"torch": on_torch}, __doc__)]
'''


def run_pytest(folder: Path, *words: str, xdist: str = "no:xdist") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", xdist, "-W", "error", "-rA", *words]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # of the tests around it
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A project with one suite, its tests run once, and what pytest-benchmark kept of them."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "small.yaml").write_text(SUITE)
    done = run_pytest(folder, "small.yaml", "--benchmark-json=kept.json")
    return folder, done, json.loads((folder / "kept.json").read_text())


@pytest.mark.long
@pytest.mark.alone  # beside others, a worker that waits for a core may find that its clock was read too early
def test_each_case_is_a_test_whose_steps_the_benchmark_keeps(ran):
    folder, done, kept = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed, 1 skipped" in done.stdout and "has nothing for torch" in done.stdout
    found = {each["name"]: each for each in kept["benchmarks"]}
    assert set(found) == {"[torch/cpu-baseline]", "[torch/cpu-checkpoint]"}
    (records,) = folder.glob("results/small/*/*.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    timed = {
        line["slot"]["case"]: line["times"]["step_seconds"] for line in lines if "times" in line
    }  # the last counts
    steps = sorted(step for each in timed.values() for step in each)
    assert sorted(step for each in found.values() for step in each["stats"]["data"]) == pytest.approx(steps)
    told = found["[torch/cpu-checkpoint]"]["extra_info"]
    assert (
        told["answer"] == "bit_exact" and told["peak_bytes"] > 0 and told["predicted_bytes"] > told["floor_bytes"] > 0
    )


@pytest.mark.long
@pytest.mark.alone
def test_a_case_that_became_worse_fails(ran, tmp_path, made_up):
    folder, _, _ = ran
    (records,) = folder.glob("results/small/*/*.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for line in lines:
        if "memory" in line:
            line["memory"] |= {"peak_host_bytes": 1 << 19, "resolution_bytes": 1 << 12}  # half of what is made up
    earlier = tmp_path / "earlier"
    for place, factor in (("here", 1), ("there", 1000)):  # what another machine took says nothing about this one
        for line in lines:
            line["origin"]["machine"] |= {"name": place} if place == "there" else {}
            if "memory" in line:
                line["memory"]["peak_host_bytes"] *= factor
        (earlier / place).mkdir(parents=True)
        (earlier / place / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "small.yaml").write_text(SUITE)
    words = ["small.yaml", "-k", "checkpoint", "--harness-plugin", str(made_up), "--harness-against", str(earlier)]
    done = run_pytest(tmp_path, *words)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
    assert "peak became worse" in done.stdout and "(2.000 x)" in done.stdout
    done = run_pytest(tmp_path, *words, "--harness-fail-on", "peak>500%")
    assert done.returncode == 0 and "1 passed, 2 deselected" in done.stdout, done.stdout


@pytest.mark.long
def test_results_lie_in_the_folder_that_is_named(tmp_path, made_up):
    (tmp_path / "small.yaml").write_text(SUITE)
    words = ["small.yaml", "-k", "checkpoint", "--harness-plugin", str(made_up), "--harness-results", "elsewhere"]
    done = run_pytest(tmp_path, *words)
    assert done.returncode == 0, done.stdout
    (records,) = tmp_path.glob("elsewhere/small/*/*.jsonl")
    assert not (tmp_path / "results").exists()
    asked = json.loads(records.read_text().splitlines()[0])["heading"]["asked"]
    assert shlex.split(asked) == ["small.yaml", "--plugin", str(made_up)]


@pytest.mark.long
def test_a_vocabulary_of_all_words_is_looked_up_as_it_was_measured(tmp_path, made_up):
    (tmp_path / "words.txt").write_text("one two three " * 1000)
    text = SUITE.replace("zipf", "words.txt\ntokenizer: words").replace("vocabulary: 8000", "vocabulary: 0")
    (tmp_path / "small.yaml").write_text(text.replace(", jax_vmap", ""))
    done = run_pytest(tmp_path, "small.yaml", "--harness-plugin", str(made_up))
    assert done.returncode == 0 and "2 passed" in done.stdout and "[torch/cpu-baseline]" in done.stdout, done.stdout


class Benchmark:
    """What a test passes to the fixture of pytest-benchmark."""

    def __init__(self):
        self.extra_info, self.disabled, self.rounds = {}, False, 0

    def pedantic(self, target, rounds=1):
        self.rounds = rounds


@pytest.mark.parametrize(
    ("times", "steps", "disabled"),
    [
        (((0.1, 0.2), (0.1, -3600.0)), [0.1, 0.2], False),  # its clock jumped
        ((), [], True),
    ],
)
def test_a_benchmark_has_the_times_that_steps_can_take_and_is_used_where_there_are_none(times, steps, disabled):
    case = Case(workload="decoder", shape={}, place="torch/cpu", corpus="x", tokenizer="bytes")
    row = Row(case, "ok", answer="bit_exact", records=tuple(Record(times=Times(step_seconds=each)) for each in times))
    suite = SimpleNamespace(row=lambda case: row, worse=lambda case: [])
    benchmark = Benchmark()
    node = SimpleNamespace(case=case, clock=pytest_plugin.Clock(), parent=suite)
    pytest_plugin.measured(benchmark, SimpleNamespace(node=node))
    assert (benchmark.rounds, list(node.clock.steps)) == (len(steps) or 1, steps)
    assert benchmark.disabled == disabled


def test_what_a_case_had_taken_when_it_failed_is_no_peak_of_it():
    case = Case(workload="decoder", shape={}, place="torch/cpu", corpus="x", tokenizer="bytes")
    row = Row(case, "oom_budget", peak_bytes=100)
    benchmark = Benchmark()
    suite = SimpleNamespace(row=lambda case: row, worse=lambda case: [])
    node = SimpleNamespace(case=case, clock=pytest_plugin.Clock(), parent=suite)
    with pytest.raises(pytest.skip.Exception):
        pytest_plugin.measured(benchmark, SimpleNamespace(node=node))
    assert (benchmark.extra_info["status"], benchmark.extra_info["peak_bytes"]) == ("oom_budget", None)


@pytest.mark.long
def test_a_wrong_answer_fails(tmp_path):
    (tmp_path / "small.yaml").write_text(SUITE.replace("checkpoint, jax_vmap", "forgetful"))
    (tmp_path / "forgetful.py").write_text(WRONG)
    done = run_pytest(tmp_path, "small.yaml", "--harness-plugin", "forgetful.py")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "the answer is diverged" in done.stdout and "Traceback" not in done.stdout


def test_an_answer_that_could_not_be_compared_fails(tmp_path):
    """It runs a few steps as it should, and ends in an error where answers are compared, which takes more of them."""
    (tmp_path / "small.yaml").write_text(SUITE.replace("checkpoint, jax_vmap", "forgetful"))
    counted = "inner, calls = parts.loss, iter([None] * 12)"
    loss = "lambda *args: inner(*args) if next(calls, 1) is None else 1 / 0"
    text = WRONG.replace("inner = parts.loss", counted)
    (tmp_path / "forgetful.py").write_text(re.sub(r"loss=lambda .*\)\)", f"loss={loss})", text))
    done = run_pytest(tmp_path, "small.yaml", "--harness-plugin", "forgetful.py")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "the answer could not be compared: error: ZeroDivisionError" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (SUITE.replace("checkpoint", "checkpont"), (), "did you mean 'checkpoint'"),
        (SUITE, ("--harness-fail-on", "peak"), "use peak>5%"),
        (SUITE, ("--harness-fail-on", "missing"), "harness compare"),
        (SUITE, ("--harness-fail-on", "peak>5%"), "name them by --harness-against"),
        (SUITE, ("--harness-plugin", "none.py"), "none.py"),
        (SUITE, ("-p", "no:benchmark"), "leave out -p no:benchmark"),
        (CLAIMED, (), "claim 'X': there is no row 'chekpoint': mend it"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, text, words, told):
    (tmp_path / "small.yaml").write_text(text)
    done = run_pytest(tmp_path, "small.yaml", *words)
    assert done.returncode == 2 and told in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_workers_of_xdist_measure_nothing_and_say_what_to_do(tmp_path):
    pytest.importorskip("xdist", reason="needs the package pytest-xdist")
    (tmp_path / "small.yaml").write_text(SUITE)
    words = ("small.yaml", "--harness-against", "nowhere.jsonl")  # what would fail each test
    done = run_pytest(tmp_path, *words, "-n", "2", xdist="xdist")
    assert done.returncode and "give -n 0, or -p no:xdist" in done.stdout and "1 error in" in done.stdout, done.stdout
    assert "Traceback" not in done.stdout and not (tmp_path / "results").exists()
    done = run_pytest(tmp_path, *words, "-n", "0", xdist="xdist")
    assert "3 failed" in done.stdout and "no:xdist" not in done.stdout, done.stdout


def test_the_control_joins_the_rounds_that_are_asked_for(tmp_path):
    (tmp_path / "small.yaml").write_text(SUITE.replace("rounds: 1", "rounds: 0"))
    done = run_pytest(tmp_path, "small.yaml", "--collect-only", "-q", "--harness-rounds", "8")
    assert done.returncode == 0 and "[torch/cpu-nothing]" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("against", "refusal"),
    [("nowhere.jsonl", "there is no 'nowhere.jsonl'"), ("empty", "'empty' has no case of small.yaml")],
)
def test_what_cannot_be_measured_fails_each_test_with_one_sentence(tmp_path, against, refusal):
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "empty").mkdir()
    done = run_pytest(tmp_path, "small.yaml", "--harness-against", against)
    assert done.returncode == 1 and "3 failed in" in done.stdout, done.stdout
    assert refusal in done.stdout and "Traceback" not in done.stdout
    assert not (tmp_path / "results").exists(), "before anything is measured"


@pytest.mark.parametrize("warnings", ["default", "error:torn:UserWarning"])
def test_lines_of_earlier_results_that_are_no_records_are_warned_of(tmp_path, warnings):
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "torn.jsonl").write_text('{"status": "o')
    done = run_pytest(tmp_path, "small.yaml", "--harness-against", "torn.jsonl", "-W", warnings)
    assert "torn.jsonl:1: this line is not a record" in done.stdout and "3 failed" in done.stdout, done.stdout
    assert ("'torn.jsonl' has no case of small.yaml" in done.stdout) is (warnings == "default")
    assert "Traceback" not in done.stdout and "\n>  " not in done.stdout, "no line of code is shown"


def test_other_yaml_files_are_left_alone(tmp_path):
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    done = run_pytest(tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout and "small.yaml" not in done.stdout


def test_comparisons_that_differ_in_their_text_or_budget_alone_have_names_of_their_own(tmp_path):
    each = "each: [{budget_gib: 1}, {budget_gib: 2}, {corpus: standard_library}, {tokenizer: bytes}]\n"
    (tmp_path / "small.yaml").write_text(SUITE + each)
    done = run_pytest(tmp_path, "small.yaml", "--collect-only", "-q")
    names = [line for line in done.stdout.splitlines() if line.startswith("small.yaml::")]
    assert done.returncode == 0 and len(names) == len(set(names)) == 4 * 3, done.stdout
    assert "small.yaml::[torch/cpu-corpus=zipf-tokenizer=bpe-budget_gib=2.0-checkpoint]" in names
