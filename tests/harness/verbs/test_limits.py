"""Predictions tried as limits: who runs out of memory within them, and how much is left."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import commands
from harness.contract import plugins
from harness.contract.place import Place
from harness.machine import facts, gpu
from harness.machine.gpu import Gpu
from harness.records import Applied, Case, Memory, Origin, Prediction, Record, Trial, store
from harness.report.limits import text
from harness.suite import reader
from harness.suite.bounds import SuiteError
from harness.verbs import limits
from harness.verbs.limits import too_large, trials
from harness.verbs.machine import Machine
from harness.verbs.plan import PlanRow

MIB = 1 << 20
CASE = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer="bytes")


def row(name: str, predicted: int | None, at_most: int | None = None, reason: str | None = None) -> PlanRow:
    case = CASE.model_copy(update={"strategies": (Applied(name=name),)})
    return PlanRow(
        case,
        predicted,
        "",
        None,
        None,
        None,
        reason,
        prediction=Prediction(at_most_bytes=at_most, at_most_coverage=0.99),
    )


def taking(needs: dict[str, int]):
    """Run cases that take as much as said: what is over the budget runs out of memory."""

    def measured(case: Case, budget: int) -> Record:
        need = needs[case.strategies[0].name]
        if need > budget:
            return Record(status="oom_budget")
        return Record(memory=Memory(peak_host_bytes=need))

    return measured


def tried(rows: list[PlanRow], **needs: int) -> list[Trial]:
    return [trial for _, trial in trials(rows, taking(needs))]


def test_each_case_runs_within_the_point_and_within_the_bound() -> None:
    over, under, beyond = tried(
        [row(name, 200 * MIB, 220 * MIB) for name in ("over", "under", "beyond")],
        over=205 * MIB,
        under=190 * MIB,
        beyond=300 * MIB,
    )
    assert (over.at_point, over.at_most, over.peak_bytes) == ("oom_budget", "ok", 205 * MIB)
    assert (under.at_point, under.at_most) == ("ok", "ok")
    assert (beyond.at_point, beyond.at_most, beyond.peak_bytes, beyond.slack) == (
        "oom_budget",
        "oom_budget",
        None,
        None,
    )
    assert under.slack is not None and round(under.slack, 3) == 0.158


def test_a_case_without_a_bound_runs_within_the_point_alone_and_one_without_a_prediction_not_at_all() -> None:
    alone, unknown = tried([row("alone", 200 * MIB), row("unknown", None, reason="its operator has no sizes")], alone=1)
    assert (alone.at_point, alone.at_most) == ("ok", None)
    assert (unknown.at_point, unknown.reason) == (None, "its operator has no sizes")


def test_a_case_whose_corpus_is_too_short_says_so_and_the_others_are_tried() -> None:
    def measured(case: Case, budget: int) -> Record:
        if case.strategies[0].name == "long":
            raise SuiteError("the corpus has too few tokens")
        return Record(memory=Memory(peak_host_bytes=10))

    first, second = (trial for _, trial in trials([row("long", 10, 12), row("short", 10, 12)], measured))
    assert (first.predicted_peak_bytes, first.reason, first.at_point) == (10, "the corpus has too few tokens", None)
    assert second.at_point == "ok"


def test_a_gpu_whose_peak_is_missing_has_none_and_not_that_of_its_host() -> None:
    on_gpu = row("a", 200 * MIB, 220 * MIB)
    on_gpu = replace(on_gpu, case=on_gpu.case.model_copy(update={"place": Place("torch", "cuda")}))

    def peak(device: int | None) -> int | None:
        memory = Memory(peak_host_bytes=900 * MIB, peak_device_bytes=device)
        [(_, trial)] = trials([on_gpu], lambda case, budget: Record(case=case, memory=memory))
        return trial.peak_bytes

    assert (peak(150 * MIB), peak(None)) == (150 * MIB, None)


def test_a_gpu_in_torch_runs_within_the_segments_in_which_its_peak_lies() -> None:
    segments = {"predicted_peak_bytes": 200, "predicted_reserved_bytes": 290, "predicted_base_bytes": 60}
    at_most = row("a", 200, 220)
    on_gpu = replace(at_most, prediction=at_most.prediction.model_copy(update=segments))
    budgets: list[int] = []
    [(_, trial)] = trials([on_gpu], lambda case, budget: budgets.append(budget) or Record(case=case))
    assert budgets == [230, 250] and (trial.predicted_peak_bytes, trial.at_most_bytes) == (200, 220)


def test_trials_are_predicted_for_the_gpu_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smallest: str
) -> None:
    (tmp_path / "small.yaml").write_text(smallest)
    loaded = plugins.load()
    machines: list[Machine] = []
    monkeypatch.setattr(limits, "of_cases", lambda cases, *rest: machines.append(rest[-1]) or [])
    for here in (Gpu("NVIDIA L4", 22 << 30, 22 << 30, "580.1"), None):
        monkeypatch.setattr(gpu, "detect", lambda here=here: here)
        limits.run(reader.read(tmp_path / "small.yaml", loaded), loaded, (), tmp_path / "cache", tmp_path / "results")
    assert [machine.card for machine in machines] == ["NVIDIA L4", ""]


def test_what_is_more_than_the_machine_has_is_not_run() -> None:
    assert too_large(row("a", 1 << 60)).startswith("not run: it needs")
    assert too_large(row("a", 1)) == ""


@pytest.mark.parametrize(
    ("free", "said"), [(1 << 30, "not run: it needs 2,048 MiB, and 1,024 MiB are"), (3 << 30, ""), (None, "")]
)
def test_what_is_more_than_the_gpu_has_is_not_run(monkeypatch: pytest.MonkeyPatch, free: int | None, said: str) -> None:
    monkeypatch.setattr(gpu, "free_to_use", lambda: free)
    large = row("a", 1 << 30, 2 << 30)
    large = replace(large, case=large.case.model_copy(update={"place": Place("torch", "cuda"), "ranks": 2}))
    assert too_large(large).startswith(said) and bool(too_large(large)) == bool(said)


@pytest.mark.long
def test_the_doctor_runs_each_case_within_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smallest: str, cache: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (tmp_path / "small.yaml").write_text(smallest.replace("[checkpoint]", "[nothing]"))
    done = CliRunner().invoke(commands.app, ["doctor", "--limits", "small.yaml"])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("results/small_limits/*/*.jsonl")
    _, point, most, last = store.read(file)[0]
    trial, peak = last.trial, most.memory.peak_host_bytes
    assert trial and point.case and most.case and peak
    assert (trial.at_point, trial.at_most) == (point.status, most.status) and most.status == "ok"
    within = point.case.budget_bytes, most.case.budget_bytes
    assert within == (trial.predicted_peak_bytes, trial.at_most_bytes)
    assert trial.peak_bytes == peak <= most.case.budget_bytes
    assert "Within what they take at most, 0 of 1 cases ran out of memory (0.0%)." in done.stdout


def test_what_ends_before_a_case_was_tried_hides_no_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smallest: str
) -> None:
    (tmp_path / "small.yaml").write_text(smallest)
    loaded = plugins.load()
    plan = reader.read(tmp_path / "small.yaml", loaded)

    def attempt() -> list[Record]:
        return limits.run(plan, loaded, (), tmp_path / "cache", tmp_path / "results")[1]

    def interrupted(*rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(limits, "of_cases", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert not list(tmp_path.rglob("*.jsonl"))
    monkeypatch.setattr(limits, "of_cases", lambda cases, *rest: [PlanRow(case, 1, "", 1, 1, None) for case in cases])
    monkeypatch.setattr(limits.alone, "measured", lambda case, *rest: Record(case=case))
    records = attempt()
    (file,) = tmp_path.rglob("*.jsonl")
    written = store.read(file)[0]
    assert [record.trial is not None for record in written] == [False, False, True, False, True]
    assert [record for record in written if record.trial or record.heading.title] == records
    assert all(record.origin.versions == facts.versions() | dict(loaded.versions) for record in written)


def test_where_no_case_can_be_tried_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smallest: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(smallest)
    monkeypatch.setattr(limits, "obstacle", lambda *rest: "it does not run here")
    done = CliRunner().invoke(commands.app, ["doctor", "--limits", "small.yaml"])
    assert done.exit_code == 0 and "No case could be tried." in done.output and "records:" not in done.output


def test_each_comparison_and_machine_has_a_table_of_its_own() -> None:
    (trial,) = tried([row("a", 200 * MIB, 220 * MIB)], a=190 * MIB)
    cases = [CASE.model_copy(update={"shape": {"tokens": 64, "heads": heads}}) for heads in (4, 8, 8)]
    origins = [Origin(machine={"name": name}) for name in ("m", "m", "n")]
    shown = text(
        [
            Record(case=case.model_copy(update={"budget_bytes": (at + 1) << 30}), trial=trial, origin=origin)
            for at, (case, origin) in enumerate(zip(cases, origins, strict=True))
        ]
    )
    heads = [line.partition("zipf, ")[2] for line in shown.splitlines() if line.startswith("##")]
    assert heads == ["heads 4", "heads 8, on m", "heads 8, on n"]


def test_the_report_counts_the_dead_and_averages_what_was_left() -> None:
    trials_ = tried(
        [row(name, 200 * MIB, 220 * MIB) for name in ("over", "under")], over=205 * MIB, under=190 * MIB
    ) + tried([row("small", 2 * MIB, 9 * MIB)], small=MIB)
    shown = text([Record(case=CASE, trial=trial) for trial in trials_])
    assert "Within the predicted peak, 1 of 3 cases ran out of memory (33.3%)." in shown
    assert "Within what they take at most, 0 of 3 cases ran out of memory (0.0%)." in shown
    slack = "What cases of 100 MiB or more take at most was 11.6% above their peak on average."
    assert slack in shown, "the small one has a constant as its slack"
    assert "oom_budget" in shown and "7.3%" in shown


def test_a_row_of_trials_says_how_it_ended_within_which_limit() -> None:
    (trial,) = tried([row("over", 200 * MIB, 220 * MIB)], over=205 * MIB)
    lines = [line for line in text([Record(case=CASE, trial=trial)]).splitlines() if line.startswith("|")]
    names, _, cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert dict(zip(names, cells, strict=True)) == {
        "strategy": "baseline",
        "peak MiB": "205",
        "predicted MiB": "200",
        "within it": "oom_budget",
        "at most": "220",
        "within that": "ok",
        "slack": "7.3%",
    }
