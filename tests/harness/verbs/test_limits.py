"""Predictions tried as limits: who runs out of memory within them, and how much is left."""

from harness.records import Applied, Case, Memory, Origin, Prediction, Record, Trial
from harness.report.limits import text
from harness.verbs.limits import too_large, trials
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


def test_what_is_more_than_the_machine_has_is_not_run() -> None:
    assert too_large(row("a", 1 << 60)).startswith("not run: it needs")
    assert too_large(row("a", 1)) == ""


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
    assert "cases of 100 MiB or more left 11.6% on average" in shown, "the small one has a constant as its slack"
    assert "oom_budget" in shown and "7.3%" in shown
