"""What results say of themselves: equal things, predictions, bounds and words, counted over all of them."""

from harness.records import Applied, Case, Origin, Record, Slot
from harness.records.record import Fit
from harness.report import trust
from harness.verdicts.interval import Interval
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import Speed

MIB = 1 << 20


def row(*names, backend="torch", peak=200 * MIB, predicted=200 * MIB, at_most=210 * MIB, **changes):
    case = Case(
        workload="decoder",
        shape={"tokens": 64},
        place=f"{backend}/cpu",
        corpus="zipf",
        tokenizer="bytes",
        strategies=tuple(Applied(name=name) for name in names),
    )
    figures = {
        "status": "ok", "peak_bytes": peak, "peak_ratio": peak / (200 * MIB), "predicted_bytes": predicted,
        "at_most_bytes": at_most, "residual_bytes": peak - predicted, "residual_ratio": (peak - predicted) / predicted,
    }  # fmt: skip
    return Row(case, **(figures | changes))


def speed(word, half=0.1, error=0.02):
    return Speed(1.0, Interval(1 / (1 + half), 1 + half), word, 6, None, error, 10)


def lines(*tables):
    rows = trust.table(tables).splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in rows]


def test_the_same_code_is_held_against_itself():
    def of(peak, word):
        rows = (row(), row("nothing", peak=peak, residual_bytes=None), row("checkpoint", residual_bytes=None))
        return Comparison(rows[0].case, rows, control=speed(word))

    peak, *_, time = lines(of(200 * MIB, "open"), of(204 * MIB, "within 5 %"), of(210 * MIB, "slower"))
    assert peak == (
        "peak",
        "that of `nothing`, the same code, for peaks of 32 MiB and more",
        "3",
        "2.0% apart (median), 4.7% (95th percentile), 5.0% (largest)",
    )
    assert time == (
        "time",
        "that of `nothing`, the same code",
        "3",
        "1 called slower or faster; at most about 0 would be by chance",
    )


def test_predictions_are_held_against_what_ran_by_framework_but_not_those_that_nobody_should_believe():
    good = tuple(row("checkpoint", peak=(200 + at) * MIB) for at in range(20))
    small = row("checkpoint", peak=20 * MIB, predicted=10 * MIB, at_most=30 * MIB)
    doubtful = row("checkpoint", peak=900 * MIB, flags=("unstable",))
    failed = row("checkpoint", peak=900 * MIB, status="oom_budget")
    few = tuple(row("checkpoint", backend="jax", peak=300 * MIB) for _ in range(19))
    rows = lines(*(Comparison(group[0].case, group) for group in ((*good, small, doubtful, failed), few)))
    assert [each[:3] for each in rows] == [
        ("predicted", "the peak of the run, torch, for peaks of 100 MiB and more", "20"),
        ("at most", "the peak of the run", "40"),
    ]
    assert rows[0][3] == "4.8% apart (median), 9.0% (95th percentile), 9.5% (largest)"
    assert rows[1][3] == "28 took more, 70.0%"


def test_predictions_that_came_after_their_run_are_counted():
    def at(minute, kind):
        return Record(origin=Origin(utc=f"2026-11-29T01:{minute:02}:00"), slot=Slot(case="c", kind=kind))

    run = at(10, "memory")
    before, after = (row("checkpoint", records=(run,), prediction=at(minute, "predict")) for minute in (9, 11))
    rows = lines(Comparison(before.case, (before,) * 12 + (after,) * 8))
    assert [each[3].endswith("; 8 predicted after the run, by later code") for each in rows] == [True, True]
    (bound,) = lines(Comparison(before.case, (before,)))
    assert bound[3] == "0 took more, 0.0%"


def test_words_of_times_are_counted_where_there_was_enough_to_infer_from():
    speeds = [speed("slower"), speed("at most 5 % slower"), speed("open", half=0.2), speed("open", error=None)]
    rows = (row(), *(row("checkpoint", speed=each) for each in speeds))
    *_, time = lines(Comparison(rows[0].case, rows))
    assert time[2:] == ("3", "67% decided; half an interval is 10% (median)")


def test_sizes_that_were_predicted_to_fit_are_held_against_their_runs():
    def fit(predicted, passed, failed, how="oom_budget"):
        return Fit(over="tokens", budget_bytes=MIB, predicted=predicted, passed=passed, failed=failed, how=how, runs=2)

    fits = [fit(100, 104, 110), fit(100, 100, 102), fit(100, 96, 100), fit(100, None, 100)]
    fits += [fit(100, None, 80, "oom_host"), fit(100, None, None, "")]
    (only,) = trust.table([], fits).splitlines()[2:]
    assert [cell.strip() for cell in only.strip("|").split("|")] == [
        "fit",
        "a run of the predicted size within its budget",
        "4",
        "2 ran out; the longest that ran is 0.0% longer (median)",
    ]


def test_a_machine_with_less_than_the_budget_decides_nothing_of_a_predicted_size():
    fits = [
        Fit(over="tokens", budget_bytes=MIB, predicted=100, passed=passed, failed=failed, how="oom_host", runs=2)
        for passed, failed in ((96, 100), (104, 110))
    ]
    (only,) = trust.table([], fits).splitlines()[2:]
    cells = [cell.strip() for cell in only.strip("|").split("|")]
    assert cells[2:] == ["1", "0 ran out; the longest that ran is 4.0% longer (median)"]
