"""The longest value that fits: the search for it, and the runs that confirm it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.machine import facts
from harness.records import Applied, Case, Claim, Fit, Origin, Prediction, Record, store
from harness.report.fit import limits, text
from harness.suite import reader
from harness.suite.plan import Plan
from harness.suite.schema import SuiteError
from harness.verbs import fit
from harness.verbs.fit import Bracket, Search, at, brackets, following, grain, limit_of, rounded
from harness.verbs.plan import PlanRow
from harness.verdicts.claims import answer, answered
from harness.verdicts.judge import searched as searched_tables

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
    assert asked <= 25


def test_what_never_fits_says_what_the_least_value_takes():
    bracket, asked = searched(lambda value: 2 << 30, 1 << 30)
    assert asked == 1
    assert limit_of(bracket, "tokens").reason == "tokens 64 is predicted to take up to 2 GiB already"


def test_what_always_fits_ends_at_the_largest_value():
    bracket, _ = searched(lambda value: 10, 1 << 30)
    assert bracket.fits is not None and bracket.fits[0] == fit.LARGEST and bracket.fails is None


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


def test_runs_end_before_a_value_that_the_workload_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(Search, "measured", lambda self, case: Record(case=case))
    search = Search(plan(tmp_path), LOADED, (), "layers", tmp_path)
    row = brackets(search.plan, "layers", 1 << 30)[0]
    runs: list[Record] = []
    limit = search.confirmed(row, fit.Fit(over="layers", budget_bytes=1 << 30, predicted=1000), runs.append)
    assert (limit.passed, limit.runs, len(runs)) == (1000, 1, 1)
    assert limit.reason.startswith("the workload takes no layers of 1,0")


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


def test_each_row_is_searched_once_from_its_least_value_without_the_control(tmp_path):
    rows = brackets(plan(tmp_path), "tokens", 1 << 30)
    assert [(row.case.label, row.least) for row in rows] == [("baseline", 64), ("checkpoint", 64)]
    assert {row.case.budget_bytes for row in rows} == {1 << 30}
    assert at(rows[0].case, "tokens", 7).shape["tokens"] == 7


@pytest.mark.parametrize("gpu", [None, 1000])
def test_without_a_budget_each_place_has_the_memory_there_is(tmp_path, monkeypatch, gpu):
    monkeypatch.setattr(fit.gpu, "usable_bytes", lambda: gpu)
    on_both = plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cpu, torch/cuda]"))
    budgets = {row.case.place.device: row.budget for row in brackets(on_both, "tokens", None)}
    assert budgets.pop("cpu") > 1 << 30
    assert budgets == ({} if gpu is None else {"cuda": round(gpu * facts.DEVICE_SHARE)})


def test_a_gpu_that_is_not_seen_needs_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(fit.gpu, "usable_bytes", lambda: None)
    on_gpu = plan(tmp_path, SUITE.replace("[torch/cpu]", "[torch/cuda]"))
    with pytest.raises(SuiteError, match="give --budget"):
        brackets(on_gpu, "tokens", None)
    assert brackets(on_gpu, "tokens", 1 << 30)


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
    assert [each.rows[1][at] for each, at in zip(tables, ratios, strict=False)] == ["2.00 x", "1.50 x"]
    assert [row[:2] for row in tables[2].rows] == [("baseline", "500")]


def test_durations_are_written_in_the_unit_that_suits_them():
    assert [fit.lasting(s) for s in (600, 4 * 3600, 90 * 86400)] == ["10 minutes", "4 hours", "90 days"]


def test_what_fits_is_decided_by_what_a_value_takes_at_most():
    bracket = Bracket(CASE.model_copy(update={"budget_bytes": 1000}), 64)
    bracket.take(64, PlanRow(CASE, 800, "", None, 1000, None, prediction=Prediction(at_most_bytes=900)))
    bracket.take(128, PlanRow(CASE, 990, "", None, 1000, None, prediction=Prediction(at_most_bytes=1100)))
    assert (bracket.fits, bracket.fails) == ((64, 900), (128, 1100))
    limit = limit_of(bracket, "tokens")
    assert (limit.predicted, limit.predicted_peak_bytes, limit.at_most_bytes) == (64, 800, 900)
    shown = text([Record(case=CASE, limits=limit)])
    assert "predicted MiB" in shown and "at most" in shown
