"""The longest value that fits: the search for it, and the runs that confirm it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from harness import backends
from harness.backends.cards import CARDS
from harness.cli import commands
from harness.cli import fit as cli_fit
from harness.contract import plugins
from harness.contract.place import Place
from harness.machine import facts, gpu, throughput
from harness.machine.gpu import Gpu
from harness.records import Applied, Case, Claim, Fit, Origin, Prediction, Record, store
from harness.report.fit import limits, text
from harness.report.plan import BETWEEN_RANKS, NO_HOST, UNBOUNDED
from harness.report.words import SEGMENTS
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.suite.plan import Plan
from harness.suite.units import lasting, shown
from harness.verbs import fit
from harness.verbs.fit import Bracket, Search, at, brackets, following, grain, limit_of, rounded
from harness.verbs.machine import Machine as OfPlan
from harness.verbs.plan import PlanRow, row_of
from harness.verdicts.claims import answer, answered
from harness.verdicts.judge import searched as searched_tables
from harness.workloads.causal_lm import configs

LOADED = plugins.load()
SUITE = """
title: Small
workload: decoder
places: [torch/cpu]
corpus: zipf
shape: {layers: 1, width: 32, heads: 2, vocabulary: 300, tokens: [64, 128]}
strategies: [nothing, checkpoint]
rounds: 0
"""


def plan(tmp_path: Path, text: str = SUITE) -> Plan:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return reader.read(path, LOADED)


CASE = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer="bytes")


def searched(peak_of, budget, least=64):
    """Search as the predictor would, with peaks that are known; give the bracket and the number of predictions."""
    bracket, asked = Bracket(CASE.model_copy(update={"budget_bytes": budget}), least), 0
    while (value := bracket.next()) is not None:
        asked += 1
        assert asked < 40, "it does not end"
        peak = peak_of(value)
        bracket.take(value, PlanRow(CASE, peak, "", None, budget, None))
    return bracket, asked


@pytest.mark.parametrize(
    "peak_of",
    [
        lambda value: 1000 * value,
        lambda value: 50_000_000 + 300 * value,
        lambda value: 1_000_000 + 20 * value + value * value // 7,
        lambda value: 4096 * (value // 512) + 10 * value + 10_000,  # in steps
    ],
    ids=["linear", "offset", "quadratic", "stairs"],
)
@pytest.mark.parametrize("budget", [60_000_000, 1 << 30])
def test_the_bracket_closes_around_the_limit_in_few_predictions(peak_of, budget):
    bracket, asked = searched(peak_of, budget)
    assert bracket.fits is not None and bracket.fails is not None
    low, high = bracket.fits[0], bracket.fails[0]
    assert peak_of(low) <= budget < peak_of(high)
    assert high - low <= grain(low)
    assert asked <= 14


def test_on_a_gpu_in_torch_the_limit_is_that_of_the_segments():
    case = CASE.model_copy(update={"place": Place("torch", "cuda"), "budget_bytes": 1 << 30})
    bracket = Bracket(case, 64)
    while (value := bracket.next()) is not None:
        figures = {"peak": 1000 * value, "reserved": 2000 * value + 100, "base": 100}
        prediction = Prediction(**{f"predicted_{name}_bytes": size for name, size in figures.items()})
        bracket.take(value, PlanRow(case, 1000 * value, "", None, 1 << 30, None, prediction=prediction))
    assert 2000 * bracket.fits[0] <= 1 << 30 < 2000 * bracket.fails[0]
    assert limit_of(bracket, "tokens").predicted_peak_bytes == 1000 * bracket.fits[0]


def test_what_never_fits_says_what_the_least_value_takes():
    bracket, asked = searched(lambda value: 2 << 30, 1 << 30)
    assert asked == 1
    assert limit_of(bracket, "tokens").reason == "tokens 64 is predicted to take up to 2 GiB already"


@pytest.mark.parametrize(("least", "longest"), [(64, 960), (2048, None)])
def test_where_the_host_beside_a_gpu_decides_the_limit_says_so(least, longest):
    bracket = Bracket(CASE.model_copy(update={"budget_bytes": 1 << 40}), least)
    while (value := bracket.next()) is not None:
        on_host = Prediction(predicted_host_bytes=value << 20)
        bracket.take(
            value, PlanRow(CASE, value, "", None, 1 << 40, None, prediction=on_host, host_limit_bytes=1000 << 20)
        )
    limit = limit_of(bracket, "tokens")
    assert limit.predicted == (longest and pytest.approx(longest, abs=40))
    refused = bracket.fails[0]
    over = f"takes {shown(refused << 20)} of the host and is {shown(refused - 1000 << 20)} over 1,000 MiB"
    assert limit.reason == f"tokens {refused:,} {over}"


@pytest.mark.parametrize("least", [64, fit.LARGEST, fit.LARGEST + 5])
def test_what_always_fits_ends_at_the_largest_value_and_says_so(least):
    bracket, _ = searched(lambda value: 10, 1 << 30, least)
    value = max(least, fit.LARGEST)
    assert bracket.fits is not None and bracket.fits[0] == value and bracket.fails is None
    assert limit_of(bracket, "corpus_tokens").reason == f"nothing above corpus_tokens {value:,} is predicted"


def test_what_cannot_be_predicted_ends_with_the_reason():
    bracket = Bracket(CASE.model_copy(update={"budget_bytes": 1000}), 64)
    bracket.take(64, PlanRow(CASE, None, None, None, 1, None, "the compiler is missing"))
    assert bracket.next() is None
    assert limit_of(bracket, "tokens").reason == "the compiler is missing"


def test_values_are_multiples_of_their_grain():
    assert [rounded(value) for value in (1, 63, 130, 16_381, 100_001)] == [1, 63, 130, 16_256, 99_328]
    assert [grain(value) for value in (1, 64, 128, 16_384)] == [1, 1, 2, 256]


@dataclass
class Machine:
    """A machine on which a value runs when it is at most a limit."""

    limit: int
    status: str = "oom_budget"

    def measured(self, search: Search, case: Case) -> Record:
        value = case.shape["tokens"]
        return Record(case=case, status="ok" if value <= self.limit else self.status)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [9_000, 9_600, 10_000, 10_400, 11_000, 11_400])
def test_runs_confirm_the_limit_within_a_step_of_it(tmp_path, monkeypatch, limit):
    machine = Machine(limit)
    monkeypatch.setattr(Search, "measured", lambda self, case: machine.measured(self, case))
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    row = brackets(search.plan, "tokens", 1 << 30)[0]
    runs: list[Record] = []
    confirmed = search.confirmed(row, fit.Fit(over="tokens", budget_bytes=1 << 30, predicted=10_112), runs.append)
    assert len(runs) == confirmed.runs <= fit.RUNS
    assert confirmed.passed is not None and confirmed.failed is not None and confirmed.how == "oom_budget"
    assert confirmed.passed <= limit < confirmed.failed
    assert confirmed.failed - confirmed.passed <= 2 * fit.STEP * confirmed.passed


def test_an_error_ends_the_runs_with_its_reason(tmp_path, monkeypatch):
    failing = Record(status="error", evidence={"message": "it broke"})
    monkeypatch.setattr(Search, "measured", lambda self, case: failing)
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    row = brackets(search.plan, "tokens", 1 << 30)[0]
    runs: list[Record] = []
    confirmed = search.confirmed(row, fit.Fit(over="tokens", budget_bytes=1 << 30, predicted=128), runs.append)
    assert (confirmed.reason, confirmed.runs, len(runs), confirmed.longest) == ("it broke", 1, 1, None)


def test_runs_end_with_a_reason_where_the_corpus_is_too_short(tmp_path):
    """A prediction supposes as many tokens as it needs; the row must not take those after it along."""
    (tmp_path / "short.txt").write_text("too few tokens\n" * 20)
    small = plan(tmp_path, SUITE.replace("corpus: zipf", "corpus: short.txt\ntokenizer: bytes"))
    search = Search(small, LOADED, (), "tokens", tmp_path)
    row = brackets(search.plan, "tokens", 1 << 30)[0]
    limit = search.confirmed(row, fit.Fit(over="tokens", budget_bytes=1 << 30, predicted=4096), lambda run: None)
    assert "300 tokens" in limit.reason and (limit.runs, limit.passed, limit.failed) == (0, None, None)


def test_runs_end_before_a_value_that_the_workload_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(Search, "measured", lambda self, case: Record(case=case))
    search = Search(plan(tmp_path), LOADED, (), "layers", tmp_path)
    row = brackets(search.plan, "layers", 1 << 30)[0]
    runs: list[Record] = []
    limit = search.confirmed(row, fit.Fit(over="layers", budget_bytes=1 << 30, predicted=1000), runs.append)
    assert (limit.passed, limit.runs, len(runs)) == (1000, 1, 1)
    assert limit.reason.startswith("the workload refuses layers 1,0")


PUBLISHED = """
title: A model of 5,000 positions
workload: causal_lm
places: [torch/cpu]
corpus: zipf
shape: {config: %s, tokens: 2048}
strategies: [checkpoint]
rounds: 0
"""


@pytest.fixture
def of_5000_positions(tmp_path, monkeypatch):
    """A search over the tokens of a model that takes no more than 5,000, of which each is predicted to take 1,000."""
    values = configs.read("gpt2")
    values[configs.key(values, "max_position_embeddings")] = 5000
    (tmp_path / "config.json").write_text(json.dumps(values))
    search = Search(plan(tmp_path, PUBLISHED % (tmp_path / "config.json")), LOADED, (), "tokens", tmp_path)
    search.asked = []

    def of_cases(cases, *rest, **more):
        search.asked.append({case.shape["tokens"] for case in cases})
        return [PlanRow(case, 1000 * case.shape["tokens"], "", None, case.budget_bytes, None) for case in cases]

    monkeypatch.setattr(fit, "of_cases", of_cases)
    return search


def test_the_largest_value_that_the_workload_takes_is_a_limit_too(of_5000_positions, tmp_path):
    _, (_, *rows) = fit.run(of_5000_positions, [1 << 30], tmp_path, predict_only=True)
    reason = "the workload refuses tokens 5,001: 5,001 tokens are more than the 5,000 positions of gpt2"
    assert [(row.limits.predicted, row.limits.reason, row.limits.open) for row in rows] == [(5000, reason, True)] * 2
    assert of_5000_positions.asked == [{2048}, {5000}]
    assert f"- checkpoint: {reason}" in text(rows)
    _, (_, *rows) = fit.run(of_5000_positions, [4_000_000], tmp_path, predict_only=True)
    assert [(row.limits.reason, row.limits.open) for row in rows] == [("", False)] * 2, "memory ends first"
    assert all(3900 < row.limits.predicted <= 4000 for row in rows)


@pytest.mark.parametrize(("predicted", "runs"), [(5000, 1), (4800, 3), (4992, 2)])
def test_runs_reach_the_largest_value_that_the_workload_takes(of_5000_positions, monkeypatch, predicted, runs):
    monkeypatch.setattr(Search, "measured", lambda self, case: Record(case=case))
    row = brackets(of_5000_positions.plan, "tokens", 1 << 30)[0]
    limit = fit.Fit(over="tokens", budget_bytes=1 << 30, predicted=predicted)
    limit = of_5000_positions.confirmed(row, limit, lambda run: None)
    assert (limit.passed, limit.runs) == (5000, runs) and limit.is_of_workload
    assert limit.reason.startswith("the workload refuses tokens 5,001: 5,001 tokens are more than the 5,000 positions")


def test_why_nothing_more_was_predicted_is_said_beside_what_ran(tmp_path, monkeypatch):
    machine = Machine(10_300)
    monkeypatch.setattr(Search, "measured", lambda self, case: machine.measured(self, case))
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    limit = fit.Fit(over="tokens", budget_bytes=1 << 30, predicted=10_112, reason="the compiler is missing")
    limit = search.confirmed(brackets(search.plan, "tokens", 1 << 30)[0], limit, lambda run: None)
    assert limit.passed and limit.failed and limit.reason == "the compiler is missing"


def test_a_vocabulary_of_all_words_is_searched_as_it_is_measured(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("one two three " * 1000)
    text = SUITE.replace("corpus: zipf", "corpus: words.txt\ntokenizer: words").replace(
        "vocabulary: 300", "vocabulary: 0"
    )
    search = Search(plan(tmp_path, text), LOADED, (), "tokens", tmp_path)
    monkeypatch.setattr(search, "predicted", lambda budget: [])
    fit.run(search, [1 << 30], tmp_path, predict_only=True)
    assert {case.shape["vocabulary"] for case in search.plan.cases} == {4}


def test_what_to_run_next():
    assert following(100, None) == 105
    assert following(None, 1000) == rounded(950)
    assert following(1000, 1300) == rounded(1150)
    assert following(1000, 1050) is None
    assert following(None, 1) is None
    assert [following(None, failed) for failed in (2, 3, 10, 20)] == [1, 2, 9, 19], "none that failed already"


def test_each_row_is_searched_once_from_its_least_value_without_the_control(tmp_path):
    rows = brackets(plan(tmp_path), "tokens", 1 << 30)
    assert [(row.case.label, row.least) for row in rows] == [("baseline", 64), ("checkpoint", 64)]
    assert {row.case.budget_bytes for row in rows} == {1 << 30}
    assert at(rows[0].case, "tokens", 7).shape["tokens"] == 7


@pytest.mark.parametrize(("budget", "allowed"), [(None, 2 << 30), (1 << 30, 1 << 30)])
def test_the_budget_of_the_suite_holds_unless_another_is_named(tmp_path, monkeypatch, budget, allowed):
    asked = []

    def of_cases(cases, *rest, **more):
        asked.extend(case.budget_bytes for case in cases)
        return [PlanRow(case, None, None, 1, 1, None, reason="not now") for case in cases]

    monkeypatch.setattr(fit, "of_cases", of_cases)
    search = Search(plan(tmp_path, SUITE + "budget_gib: 2\n"), LOADED, (), "tokens", tmp_path)
    assert {row.budget for row in search.predicted(budget)} == {allowed} == set(asked)


@pytest.mark.parametrize("gpu", [None, 1000])
def test_without_a_budget_each_place_has_the_memory_there_is(tmp_path, monkeypatch, gpu):
    monkeypatch.setattr(fit.gpu, "usable_bytes", lambda: gpu)
    on_both = plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cpu, torch/cuda]"))
    budgets = {row.case.place.device: row.budget for row in brackets(on_both, "tokens", None)}
    assert budgets.pop("cpu") > 1 << 30
    assert budgets == ({} if gpu is None else {"cuda": round(gpu * facts.DEVICE_SHARE)})


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_a_place_of_which_no_memory_is_known_is_said_to_be_left_out(tmp_path, monkeypatch, budget):
    def of_cases(cases, *rest, **more):
        return [PlanRow(case, 1 << 60, "", None, 1, None) for case in cases]

    monkeypatch.setattr(fit.gpu, "usable_bytes", lambda: None)
    monkeypatch.setattr(fit, "of_cases", of_cases)
    said = []
    on_both = plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cpu, torch/cuda]"))
    Search(on_both, LOADED, (), "tokens", tmp_path, said.append).predicted(budget)
    left_out = ["torch/cuda is left out, as its memory is not known: give --budget, --gpu or --gpu-memory"] * (
        budget is None
    )
    assert [sentence for sentence in said if "left out" in sentence] == left_out


def test_a_gpu_that_is_not_seen_needs_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(fit.gpu, "usable_bytes", lambda: None)
    on_gpu = plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cuda]"))
    with pytest.raises(SuiteError, match="give --budget"):
        brackets(on_gpu, "tokens", None)
    assert brackets(on_gpu, "tokens", 1 << 30)


def asked(tmp_path, monkeypatch, here, *words):
    """Search on torch/cuda by predictions alone; return what was said and the machine that cases were predicted for."""
    machines = []

    def of_cases(cases, plan, plugins, names, machine, **more):
        machines.append(machine)
        return [PlanRow(case, 1 << 60, "", None, case.budget_bytes, None) for case in cases]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "of_cases", of_cases)
    monkeypatch.setattr(gpu, "detect", lambda: here)
    monkeypatch.setattr(gpu, "usable_bytes", lambda: here and here.usable_bytes)
    plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cuda]"))
    done = CliRunner().invoke(commands.app, ["fit", "small.yaml", "--over", "tokens", "--predict-only", *words])
    return done, machines


HERE = Gpu("NVIDIA L4", 20 << 30, 20 << 30, "580.1")


@pytest.mark.parametrize(
    ("here", "words", "card", "budget"),
    [
        (HERE, (), "NVIDIA L4", int(facts.DEVICE_SHARE * (20 << 30))),
        (HERE, ("--gpu", "h200"), "h200", int(facts.DEVICE_SHARE * CARDS["h200"].memory_bytes)),
        (None, ("--gpu", "h200"), "h200", int(facts.DEVICE_SHARE * CARDS["h200"].memory_bytes)),
        (None, ("--budget", "8GiB"), "", 8 << 30),
    ],
)
def test_a_search_is_for_the_gpu_that_is_named_or_else_for_that_which_is_there(
    tmp_path, monkeypatch, here, words, card, budget
):
    done, machines = asked(tmp_path, monkeypatch, here, *words)
    assert done.exit_code == 0, done.output
    assert {machine.card for machine in machines} == {card} and all(not machine.rates for machine in machines)
    (file,) = tmp_path.rglob("*.jsonl")
    assert {record.limits.budget_bytes for record in store.read(file)[0] if record.limits} == {budget}


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ((), True),
        (("--gpu", "l4"), True),
        (("--gpu", "h200"), False),
        (("--gpu", "t4"), False),
        (("--gpu", "h200", "--budget", "1GiB"), False),
    ],
)
def test_on_another_gpu_than_the_one_here_nothing_is_run(tmp_path, monkeypatch, words, runs):
    def of_cases(cases, plan, plugins, names, machine, **more):
        return [PlanRow(case, 10_000 * case.shape["tokens"], "", None, machine.limit(case), None) for case in cases]

    whole = CARDS["l4"].memory_bytes
    here, ran = Gpu("NVIDIA L4", whole, whole, "580.1"), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "of_cases", of_cases)
    monkeypatch.setattr(gpu, "detect", lambda: here)
    monkeypatch.setattr(gpu, "usable_bytes", lambda: here.usable_bytes)
    monkeypatch.setattr(backends, "absent", lambda *place: None)
    monkeypatch.setattr(throughput, "of_place", lambda place, cache: ran.append(place))
    monkeypatch.setattr(Search, "measured", lambda self, case: ran.append(case) or Record(case=case))
    plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cuda]"))
    done = CliRunner().invoke(commands.app, ["fit", "small.yaml", "--over", "tokens", *words])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.rglob("*.jsonl")
    found = [record.limits for record in store.read(file)[0] if record.limits]
    assert len(found) == 2 and all(limit.predicted for limit in found)
    assert bool(ran) == runs and {bool(limit.runs) for limit in found} == {runs}
    said = "- checkpoint: not run: another GPU is asked for than the one here"
    assert (said in done.output.splitlines()) != runs


@pytest.mark.parametrize("option", ["--gpu=rtx4090", "--gpu-memory=24GiB"])
@pytest.mark.parametrize(("place", "refused"), [("torch/cuda", False), ("torch/cpu", True)])
def test_for_a_gpu_where_none_is_limits_are_predicted_alone(tmp_path, monkeypatch, place, refused, option):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "detect", lambda: None)
    monkeypatch.setattr(gpu, "usable_bytes", lambda: None)
    monkeypatch.setattr(throughput, "of_place", lambda place, cache: None)
    monkeypatch.setattr(cli_fit, "run", lambda *words: asked.append(words[-1]) or (tmp_path, []))
    monkeypatch.setattr(cli_fit, "text", lambda records: "")
    plan(tmp_path, SUITE.replace("[torch/cpu]", f"[{place}]"))
    done = CliRunner().invoke(commands.app, ["fit", "small.yaml", "--over", "tokens", option])
    assert asked == ([] if refused else [True]), done.output
    assert ("a GPU is named, and no case is on one" in str(done.exception)) == refused


def test_a_card_that_nobody_knows_is_refused(tmp_path, monkeypatch):
    done, machines = asked(tmp_path, monkeypatch, None, "--gpu", "h1000")
    assert done.exit_code and not machines
    assert "--gpu: there is no card 'h1000'; did you mean 'h100'?" in str(done.exception) + done.output


def test_ranks_on_the_host_have_a_part_of_its_memory_each(tmp_path):
    on_ranks = plan(tmp_path, SUITE.replace("[nothing, checkpoint]", "[ddp]\nranks: [2, 4]"))
    budgets = {row.case.label: row.budget for row in brackets(on_ranks, "tokens", None)}
    whole = int(facts.total_bytes() * facts.HOST_SHARE)
    assert budgets == {"baseline": whole, "ddp on 2 ranks": whole // 2, "ddp on 4 ranks": whole // 4}
    assert {row.budget for row in brackets(on_ranks, "tokens", 1 << 30)} == {1 << 30}, "a budget is that of each"


@pytest.mark.parametrize(("ranks", "need_gib", "runs"), [(1, 9, True), (1, 10, False), (2, 4, True), (2, 5, False)])
def test_a_row_whose_ranks_need_more_than_is_free_is_not_run_and_says_so(tmp_path, monkeypatch, ranks, need_gib, runs):
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    ran = []
    monkeypatch.setattr(search, "measured", lambda case: ran.append(case) or Record(case=case))
    case = CASE.model_copy(update={"ranks": ranks, "budget_bytes": 64 << 30})
    best = PlanRow(case, need_gib << 30, "", None, 64 << 30, None)
    bracket = Bracket(case, 64, fits=(128, need_gib << 30), best=best)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 30))
    limit = search.confirmed(bracket, limit_of(bracket, "tokens"), lambda run: None)
    assert bool(ran) == runs
    assert limit.reason.startswith("" if runs else "not run: it needs 10,") and limit.predicted == 128
    assert "not run" not in limit.reason if runs else limit.reason.endswith("10,240 MiB are free here")


def interrupted(*rest, **more):
    raise KeyboardInterrupt


def test_what_ends_before_a_limit_is_known_hides_no_earlier_results(tmp_path, monkeypatch):
    search = Search(plan(tmp_path), LOADED, (), "token", tmp_path)
    with pytest.raises(SuiteError, match="'token' is not a size"):
        fit.run(search, [1 << 30], tmp_path / "results", predict_only=True)
    search.over = "tokens"
    monkeypatch.setattr(fit, "of_cases", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit.run(search, [1 << 30], tmp_path / "results", predict_only=True)
    rows = brackets(search.plan, "tokens", 1 << 30)
    for row in rows:
        row.fits, row.fails = (128, 1 << 29), (256, 1 << 31)
    monkeypatch.setattr(search, "predicted", lambda budget: rows)
    runs = iter((Record(), KeyboardInterrupt()))

    def measured(case):
        if isinstance(run := next(runs), Record):
            return run
        raise run

    monkeypatch.setattr(search, "measured", measured)
    with pytest.raises(KeyboardInterrupt):
        fit.run(search, [1 << 30], tmp_path / "results", predict_only=False)
    assert not list(tmp_path.rglob("*.jsonl"))
    runs = iter((*[Record(status="oom_budget")] * fit.RUNS, Record(), KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fit.run(search, [1 << 30], tmp_path / "results", predict_only=False)
    (file,) = tmp_path.rglob("*.jsonl")
    heading, *records = store.read(file)[0]
    assert heading.heading.title == "Small"
    assert [record.limits is not None for record in records] == [*[False] * fit.RUNS, True, False], "in their order"


def test_limits_and_runs_say_with_which_versions_they_were_found(tmp_path):
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    run = Record(origin=Origin(start="forked", worker_seconds=1.5, machine={"memory_speed": 3}))
    origin = search.record(run).origin
    assert origin.versions == facts.versions() | dict(LOADED.versions) and origin.versions["python"]
    assert (origin.suite, origin.start, origin.worker_seconds) == ("small", "forked", 1.5)
    assert origin.machine["name"] == facts.name() and origin.machine["memory_speed"] == 3


@pytest.mark.parametrize(
    ("over", "told"),
    [("token", "'token' is not a size of the workload 'decoder'"), ("norm", "'norm' is not a whole number")],
)
def test_what_is_no_size_of_the_workload_is_refused(tmp_path, over, told):
    with pytest.raises(SuiteError, match=told) as refused:
        brackets(plan(tmp_path), over, 1 << 30)
    assert "tokens" in str(refused.value) and "small.yaml" in str(refused.value)


def test_a_row_that_would_run_too_long_is_not_run_and_says_so(tmp_path, monkeypatch):
    search = Search(plan(tmp_path, SUITE + "timeout_seconds: 60\nmemory_steps: 4\n"), LOADED, (), "tokens", tmp_path)
    monkeypatch.setattr(search, "measured", lambda case: pytest.fail("it was run"))
    best = PlanRow(CASE, 1000, "", None, None, 150.0)
    bracket = Bracket(CASE.model_copy(update={"budget_bytes": 2000}), 64, fits=(128, 1000), best=best)
    limit = search.confirmed(bracket, limit_of(bracket, "tokens"), lambda run: None)
    assert limit.reason == "not run: 4 steps are expected to take 10 minutes, and the suite's timeout_seconds are 60"
    assert (limit.predicted, limit.passed, limit.runs, limit.longest) == (128, None, 0, 128)


def test_a_search_over_the_tokens_of_a_model_begins_with_few(tmp_path, monkeypatch):
    class Begun(Exception):
        pass

    def begun(search, *rest):
        raise Begun(*(case.shape["tokens"] for case in search.plan.cases if case.is_baseline))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_fit, "run", begun)
    for words, tokens in (["tokens"], 128), (["tokens", "--tokens", "300"], 300), (["batch"], 1024):
        done = CliRunner().invoke(
            commands.app, ["fit", "--model", "gpt2", "--gpu", "t4", "--predict-only", "--over", *words]
        )
        assert isinstance(done.exception, Begun) and done.exception.args == (tokens,), done.output


@pytest.mark.long
def test_the_limit_of_a_budget_is_run_into_by_real_processes(tmp_path, monkeypatch, smallest, cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (tmp_path / "small.yaml").write_text(smallest.replace("[checkpoint]", "[nothing]"))
    done = CliRunner().invoke(commands.app, ["fit", "small.yaml", "--over", "tokens", "--budget", "32MiB"])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("results/small_fit/*/*.jsonl")
    _, *runs, last = store.read(file)[0]
    limit, tokens = last.limits, {run.case.shape["tokens"]: run for run in runs}
    assert last.case.label == "baseline" and len(tokens) == len(runs) == limit.runs
    passed, failed = tokens[limit.passed], tokens[limit.failed]
    assert passed.status == "ok" and failed.status == limit.how == "oom_budget"
    assert passed.memory.peak_host_bytes <= passed.memory.budget_bytes == 32 << 20
    assert 0.95 * limit.predicted <= limit.passed < limit.failed <= 1.1 * limit.passed
    assert re.search(rf"\| +{limit.passed:,} \| {limit.failed:,} \(oom_budget\) ", done.stdout)


CLAIMED = """
claims:
  - {id: reach, says: the checkpoint reaches 128, that: longest(checkpoint) >= 128, where: {budget_gib: 1.0}}
  - {id: less, says: the baseline does not, that: longest(baseline) < 128, where: {budget_gib: 1.0}}
  - {id: other, says: another budget was searched, that: longest(baseline) >= 1, where: {budget_gib: 2.0}}
"""


def test_claims_about_limits_are_answered_below_the_table(tmp_path, monkeypatch):
    search = Search(plan(tmp_path, SUITE + CLAIMED), LOADED, (), "tokens", tmp_path)
    rows = brackets(search.plan, "tokens", 1 << 30)
    for row, value in zip(rows, (90, 200), strict=True):
        row.fits, row.fails = (value, 1 << 29), (2 * value, 1 << 31)
    monkeypatch.setattr(search, "predicted", lambda budget: rows)
    path, searched = fit.run(search, [1 << 30], tmp_path, predict_only=True)
    answers = {answer.claim.id: answer for answer in answered(searched, searched_tables(searched))}
    assert {name: answer.verdict for name, answer in answers.items()} == {
        "reach": "verified",
        "less": "verified",
        "other": "untested",
    }
    again, problems = store.read(path)
    assert not problems
    shown = text(again)
    assert "| reach   | the checkpoint reaches 128" in shown and shown.count("verified") == 2


def test_a_limit_lies_between_what_passed_and_what_failed():
    ran = Fit(over="tokens", budget_bytes=1 << 30, predicted=100, passed=90, failed=110, how="oom_budget", runs=2)
    tables = searched_tables([Record(case=CASE.model_copy(update={"budget_bytes": 1 << 30}), limits=ran)])

    def verdict(that):
        return answer(Claim(id="x", says="x", that=that), tables).verdict

    assert verdict("longest(baseline) >= 90") == "verified"
    assert verdict("longest(baseline) >= 100") == "inconclusive"
    assert verdict("longest(baseline) >= 111") == "refuted"
    assert verdict("foretold(baseline) >= 80") == "verified"
    many = ran.model_copy(update={"predicted": 4_587_520, "runs": 0})
    record = Record(case=CASE.model_copy(update={"budget_bytes": 1 << 30}), limits=many)
    told = answer(Claim(id="x", says="x", that="foretold(baseline) >= 8192"), searched_tables([record])).reason
    assert told == "predicted: 4,587,520, at least 8,192", "tokens are no bytes"


@pytest.mark.parametrize(
    ("own", "ratio"),
    [
        ({"passed": 300, "failed": 301, "how": "oom_budget", "runs": 3}, "3.00 x"),
        ({"passed": 300, "reason": "not finished after 600 s", "runs": 3}, "3.00 x or more"),
        ({}, "2.00 x, predicted"),
        ({"reason": "not finished after 600 s", "runs": 1}, "2.00 x, predicted"),
        ({"reason": "the workload refuses tokens 241", "open": True}, "2.00 x or more, predicted"),
        ({"passed": None, "failed": 1, "how": "error", "runs": 1}, ""),
    ],
)
def test_longest_values_are_compared_as_they_ran_or_as_they_are_predicted(own, ratio):
    def searched_row(*names, **ends):
        case = CASE.model_copy(update={"strategies": tuple(Applied(name=name) for name in names)})
        return Record(case=case, limits=Fit(over="tokens", budget_bytes=1 << 30, **ends))

    baseline = searched_row(predicted=120, passed=100, failed=101, how="oom_budget", runs=2)
    (table,) = limits([baseline, searched_row("checkpoint", predicted=240, **own)])
    shown = dict(zip(table.headers, table.rows[1], strict=True))
    assert shown.get("of baseline", "") == ratio


def test_on_a_gpu_a_limit_says_which_segments_hold_it(tmp_path, monkeypatch):
    def of_cases(cases, *rest, **more):
        forecasts = (Prediction(predicted_reserved_bytes=3 * (1 << 20) * case.shape["tokens"]) for case in cases)
        needs = ((1 << 20) * case.shape["tokens"] for case in cases)
        return [
            PlanRow(case, need, "", None, case.budget_bytes, None, prediction=each)
            for case, need, each in zip(cases, needs, forecasts, strict=True)
        ]

    monkeypatch.setattr(fit, "of_cases", of_cases)
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    _, (_, *rows) = fit.run(search, [1000 * (1 << 20)], tmp_path, predict_only=True)
    (table,) = limits(rows)
    row = dict(zip(table.headers, table.rows[0], strict=True))
    tokens, peak, reserved = (row[name].replace(",", "") for name in ("predicted", "predicted MiB", "reserved MiB"))
    assert (peak, reserved) == (tokens, str(3 * int(tokens)))
    (table,) = limits([each.model_copy(update={"limits": Fit(over="tokens", budget_bytes=1)}) for each in rows])
    assert "reserved MiB" not in table.headers


@pytest.mark.parametrize(
    ("place", "ranks", "limit", "due"),
    [
        ("torch/cpu", 1, {"at_most_bytes": 1}, []),
        ("torch/cpu", 1, {}, [UNBOUNDED]),
        ("torch/cuda", 1, {"at_most_bytes": 1, "host_limit_bytes": 1}, [SEGMENTS]),
        ("torch/cuda", 2, {"at_most_bytes": 1}, [SEGMENTS + NO_HOST, BETWEEN_RANKS]),
    ],
)
def test_a_limit_says_by_what_it_was_judged_as_a_plan_does(place, ranks, limit, due):
    case = CASE.model_copy(update={"place": Place(*place.split("/")), "ranks": ranks, "budget_bytes": 1 << 30})
    record = Record(case=case, limits=Fit(over="tokens", budget_bytes=1 << 30, predicted=64, **limit))
    (table,) = limits([record])
    assert list(table.remarks) == due
    assert all(each in text([record]) for each in due)


@pytest.mark.parametrize("faulty", [range(701, 1 << 20), range(1100, 1500)], ids=["from there on", "in between"])
def test_a_search_that_an_error_ended_gives_a_bound_alone(tmp_path, monkeypatch, faulty):
    def need(tokens):
        return 1000 * tokens + 10**7 * (tokens >= 1500)

    def of_cases(cases, *rest, **more):
        return [
            PlanRow(case, None, "", None, case.budget_bytes, None, reason="it ends in an error")
            if case.is_baseline and case.shape["tokens"] in faulty
            else PlanRow(case, need(case.shape["tokens"]), "", None, case.budget_bytes, None)
            for case in cases
        ]

    monkeypatch.setattr(fit, "of_cases", of_cases)
    search = Search(plan(tmp_path), LOADED, (), "tokens", tmp_path)
    _, (_, *rows) = fit.run(search, [2_000_000], tmp_path, predict_only=True)
    assert [(row.limits.open, row.limits.reason) for row in rows] == [(True, "it ends in an error"), (False, "")]
    (table,) = limits(rows)
    assert dict(zip(table.headers, table.rows[1], strict=True))["of baseline"].endswith(" x or less, predicted")


def test_each_comparison_has_a_table_of_its_own_and_its_own_baseline():
    def longest_of(layers, longest, machine, *names, tokens=64):
        shape = {"tokens": tokens, "layers": layers}
        strategies = tuple(Applied(name=name) for name in names)
        case = CASE.model_copy(update={"shape": shape, "strategies": strategies, "budget_bytes": 1 << 30})
        limits = Fit(over="tokens", budget_bytes=1 << 30, predicted=longest)
        return Record(case=case, limits=limits, origin=Origin(machine={"name": machine}))

    records = [
        longest_of(2, 4000, "m"),
        longest_of(2, 8000, "m", "checkpoint", tokens=128),
        longest_of(8, 1000, "m"),
        longest_of(8, 1500, "m", "checkpoint"),
        longest_of(8, 500, "n"),
    ]
    tables = limits(records)
    here = "longest tokens in 1 GiB: decoder on torch/cpu, layers"
    assert [each.title for each in tables] == [f"{here} 2, zipf", f"{here} 8, zipf, on m", f"{here} 8, zipf, on n"]
    ratios = [each.headers.index("of baseline") for each in tables[:2]]
    assert [each.rows[1][at] for each, at in zip(tables, ratios, strict=False)] == [
        "2.00 x, predicted",
        "1.50 x, predicted",
    ]
    assert [row[:2] for row in tables[2].rows] == [("baseline", "500")]


def test_durations_are_written_in_the_unit_that_suits_them():
    written = ["20 seconds", "10 minutes", "4 hours", "90 days"]
    assert [lasting(seconds) for seconds in (20, 600, 4 * 3600, 90 * 86400)] == written


def test_what_fits_is_decided_by_what_a_value_takes_at_most():
    bracket = Bracket(CASE.model_copy(update={"budget_bytes": 1000}), 64)
    bracket.take(64, PlanRow(CASE, 800, "", None, 1000, None, prediction=Prediction(at_most_bytes=900)))
    bracket.take(128, PlanRow(CASE, 990, "", None, 1000, None, prediction=Prediction(at_most_bytes=1100)))
    assert (bracket.fits, bracket.fails) == ((64, 900), (128, 1100))
    limit = limit_of(bracket, "tokens")
    assert (limit.predicted, limit.predicted_peak_bytes, limit.at_most_bytes) == (64, 800, 900)
    shown = text([Record(case=CASE, limits=limit)])
    assert "predicted MiB" in shown and "at most" in shown


def test_a_size_that_begins_at_zero_is_searched_to_its_end():
    bracket, _ = searched(lambda value: 1000 * value + 10, 50_010, least=0)
    assert (bracket.fits, bracket.fails) == ((50, 50_010), (51, 51_010))
    bracket, _ = searched(lambda value: 1000 * value + 10, 10, least=0)
    assert (bracket.fits[0], bracket.fails[0]) == (0, 1)


def test_a_limit_of_zero_is_run_and_so_is_what_comes_next(tmp_path, monkeypatch):
    def measured(self, case):
        return Record(case=case, status="oom_budget" if case.shape["evaluations"] else "ok")

    monkeypatch.setattr(Search, "measured", measured)
    search = Search(plan(tmp_path), LOADED, (), "evaluations", tmp_path)
    limit = Fit(over="evaluations", budget_bytes=1 << 30, predicted=0, reason="the compiler is missing")
    limit = search.confirmed(brackets(search.plan, "evaluations", 1 << 30)[0], limit, lambda run: None)
    assert (limit.passed, limit.failed, limit.runs) == (0, 1, 2)


def test_where_the_least_value_does_not_fit_the_table_says_below_what_nothing_was_tried(tmp_path):
    rows = brackets(plan(tmp_path, SUITE.replace("[64, 128]", "[4096, 2048]")), "tokens", 1000)
    rows[0].take(2048, PlanRow(CASE, 2000, "", None, 1000, None))
    rows[1].take(2048, PlanRow(CASE, None, None, None, 1000, None, "the compiler is missing"))
    records = [row.record("tokens", limit_of(row, "tokens")) for row in rows]
    (table,) = limits(records)
    assert [row[table.headers.index("predicted")] for row in table.rows] == ["below 2,048", ""]
    assert "- checkpoint: the compiler is missing" in text(records)


CARD = 4 << 30
"""Bytes of a card, of which a context takes the fourth part."""


@pytest.fixture
def on_a_card(tmp_path, monkeypatch):
    """A search over tokens on a card, and what `harness plan` says of a value within a budget on the same machine."""

    def row(case, machine):
        value = case.shape["tokens"]
        figures = {"peak": 1000 * value, "reserved": 2000 * value, "driver": 2000 * value + (1 << 30)}
        prediction = Prediction(**{f"predicted_{name}_bytes": size for name, size in figures.items()})
        return row_of(case, Record(prediction=prediction), machine)

    def of_cases(cases, plan, plugins, names, machine, **more):
        return [row(case, machine) for case in cases]

    def fits(value, budget):
        case = at(search.plan.cases[0], "tokens", value).model_copy(update={"budget_bytes": budget})
        return row(case, search.machine).fits

    monkeypatch.setattr(fit, "of_cases", of_cases)
    machine = OfPlan(1 << 40, CARD, named=frozenset({"cuda"}))
    on_gpu = plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cuda]"))
    search = Search(on_gpu, LOADED, (), "tokens", tmp_path, machine=machine)
    return search, fits


@pytest.mark.parametrize("budget", [None, 1 << 30, CARD, 100 << 30])
def test_a_plan_says_the_same_of_what_was_found(on_a_card, budget):
    search, fits = on_a_card
    for row in search.predicted(budget):
        value = row.fits[0]
        assert fits(value, budget) and not fits(row.fails[0], budget)
        assert row.fails[0] - value <= grain(value)
    assert row.budget == min(int(CARD * facts.DEVICE_SHARE), budget or CARD)


@pytest.mark.parametrize(
    ("over", "taken", "refused"),
    [("width", 34, 33), ("heads", 4, 3)],
)
def test_a_size_with_gaps_is_refused_before_anything_is_predicted(tmp_path, monkeypatch, over, taken, refused):
    monkeypatch.setattr(fit, "of_cases", lambda *rest, **more: pytest.fail("it was predicted"))
    search = Search(plan(tmp_path), LOADED, (), over, tmp_path)
    with pytest.raises(SuiteError, match=f"takes {taken} but not {refused}: list the values to try in the suite"):
        search.predicted(1 << 30)


def test_a_width_that_need_not_divide_is_searched(tmp_path, monkeypatch):
    def of_cases(cases, *rest, **more):
        return [PlanRow(case, 1000 * case.shape["width"], "", None, case.budget_bytes, None) for case in cases]

    monkeypatch.setattr(fit, "of_cases", of_cases)
    text = SUITE.replace("heads: 2", "heads: 2, head_width: 16")
    rows = Search(plan(tmp_path, text), LOADED, (), "width", tmp_path).predicted(567_000)
    assert {560 <= row.fits[0] <= 567 for row in rows} == {True}


@pytest.mark.parametrize(("seconds", "runs"), [(15.0, True), (15.1, False)])
def test_a_row_is_run_where_all_its_steps_fit_the_time_that_the_suite_allows(tmp_path, monkeypatch, seconds, runs):
    search = Search(plan(tmp_path, SUITE + "timeout_seconds: 60\nmemory_steps: 4\n"), LOADED, (), "tokens", tmp_path)
    ran = []
    monkeypatch.setattr(search, "measured", lambda case: ran.append(case) or Record(case=case, status="oom_budget"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 30))
    best = PlanRow(CASE, 1000, "", None, None, seconds)
    bracket = Bracket(CASE.model_copy(update={"budget_bytes": 2000}), 64, fits=(128, 1000), best=best)
    search.confirmed(bracket, limit_of(bracket, "tokens"), lambda run: None)
    assert bool(ran) is runs


def test_a_row_of_limits_says_what_passed_and_what_failed_and_how():
    ran = {"passed": 1024, "failed": 1280, "how": "oom_budget", "runs": 3}
    limit = Fit(
        over="tokens",
        budget_bytes=1 << 30,
        predicted=1000,
        predicted_peak_bytes=200 << 20,
        at_most_bytes=300 << 20,
        **ran,
    )
    (table,) = limits([Record(case=CASE, limits=limit)])
    assert dict(zip(table.headers, table.rows[0], strict=True)) == {
        "strategy": "baseline",
        "predicted": "1,000",
        "predicted MiB": "200",
        "at most": "300",
        "passed": "1,024",
        "failed": "1,280 (oom_budget)",
        "of baseline": "",
        "runs": "3",
    }


@pytest.mark.parametrize(
    ("words", "shown"), [([], "tokens"), (["--tokens", "256"], "tokens"), (["--over", "batch"], "batch")]
)
def test_a_search_for_a_model_says_that_the_suite_shows_where_it_begins(words, shown, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cli_fit, "run", lambda *rest: (tmp_path, []))
    asked = ["fit", "--model", "gpt2", "--place", "torch/cpu", "--predict-only", "--over", "tokens", *words]
    done = CliRunner().invoke(commands.app, asked)
    assert f"```\n\nThe search begins with the {shown} of this suite.\n" in done.output, done.output


def test_a_sentence_on_the_suite_of_a_model_names_no_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = ["fit", "--model", "gpt2", "--place", "torch/cpu", "--predict-only", "--over", "token"]
    done = CliRunner().invoke(commands.app, asked)
    assert str(done.exception).startswith("gpt2: 'token' is not a size of the workload 'causal_lm'"), done.output
