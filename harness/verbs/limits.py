"""Try predictions: run each case with its predicted peak as its budget, and then with what it takes at most.

What others call the probability that a run limited to its estimate dies (xMem, Shi et al., 2025) is the share of cases
that run out of memory so.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.contract.plugins import Plugins
from harness.machine import facts, gpu, orphans
from harness.records import Case, Record, Trial, store
from harness.run import alone, bench, locks, template
from harness.run.rounds import OF_A_PROCESS
from harness.run.schedule import obstacle
from harness.suite.bounds import SuiteError
from harness.suite.plan import Plan
from harness.verbs.machine import this_machine
from harness.verbs.plan import PlanRow, of_cases


@template.forking()
def run(
    plan: Plan,
    plugins: Plugins,
    names: tuple[str, ...],
    cache: Path,
    results: Path,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[Path, list[Record]]:
    """Try every case of a plan that can run here, but the controls, and write what came of it.

    Return the file and its records: one with the suite's title, and one for each case. Nothing is written before the
    first case was tried. Raise StoreError for results that cannot be written.
    """
    run_id = f"limits-{os.getpid()}"
    cases = [case for case in plan.cases if not case.is_control and obstacle(plugins, case) is None]
    folder = results / f"{plan.name}_limits" / facts.name()
    with locks.measuring(folder, plan.places):
        orphans.sweep()
        path = store.next_file(folder, facts.commit())

        def complete(record: Record) -> Record:
            return alone.complete(record, plan, plugins, run_id)

        records = [complete(Record(heading=bench.heading(plan, plugins)))]
        write = alone.writer(path, records[0])

        def measured(case: Case, budget: int) -> Record:
            log(f"running {case.label} on {case.place} within {budget >> 20:,} MiB")
            limited = case.model_copy(update={"budget_bytes": budget})
            record = complete(alone.measured(limited, plan, plugins, names, cache, run_id))
            write(record)
            return record

        log(f"predicting {len(cases)} cases")
        machine = this_machine((), cache)  # no rates: nothing is timed
        for row, trial in trials(of_cases(cases, plan, plugins, names, machine), measured):
            records.append(complete(Record(case=row.case, trial=trial)))
            write(records[-1])
    return path, records


def trials(rows: Sequence[PlanRow], measured: Callable[[Case, int], Record]) -> Iterator[tuple[PlanRow, Trial]]:
    """Yield each row with what came of it; `measured` runs a case with a budget in bytes.

    On a GPU in torch the budget is that of the segments in which the peak lies.
    """
    for row in rows:
        reason = row.reason or too_large(row)
        if row.peak_bytes is None or reason:
            yield row, Trial(predicted_peak_bytes=row.peak_bytes, reason=reason or "it cannot be predicted")
            continue
        beside = row.prediction.beside_bytes(within_budget=True)
        try:
            at_point = measured(row.case, row.peak_bytes + beside)
            at_most = measured(row.case, row.at_most_bytes + beside) if row.at_most_bytes is not None else None
        except SuiteError as error:  # the corpus has too few tokens for it, which a prediction supposes
            yield row, Trial(predicted_peak_bytes=row.peak_bytes, reason=str(error))
            continue
        yield (
            row,
            Trial(
                predicted_peak_bytes=row.peak_bytes,
                predicted_phase=row.phase,
                at_most_bytes=row.at_most_bytes,
                coverage=row.coverage,
                at_point=at_point.status,
                at_most=at_most.status if at_most is not None else None,
                peak_bytes=next(
                    (each.peak_bytes for each in (at_most, at_point) if each and each.status == "ok"), None
                ),
            ),
        )


def too_large(row: PlanRow) -> str:
    """Return why a case is not run: it needs more than is free here, for all its ranks on the host; else an empty text.

    What is free of the host may be taken whole, since each run is held to a budget. A GPU, of which each rank has one,
    ends a run that needs more, whatever the budget.
    """
    on_host = row.case.place.device == "cpu"
    need = row.case.ranks * ((row.need_bytes or 0) + OF_A_PROCESS) if on_host else row.need_bytes or 0
    free = facts.free_bytes() if on_host else gpu.free_to_use()
    if free is None or need <= free:
        return ""
    return f"not run: it needs {need >> 20:,} MiB, and {free >> 20:,} MiB are free here"
