"""Try predictions: run each case with its predicted peak as its budget, and then with what it takes at most.

What others call the probability that a run limited to its estimate dies (xMem, Shi et al., 2025) is the share of cases
that run out of memory so.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.contract.plugins import Plugins
from harness.machine import facts, orphans
from harness.records import Case, Record, Trial, store
from harness.run import alone, bench, locks, template
from harness.run.schedule import obstacle
from harness.suite.plan import Plan
from harness.verbs.plan import Machine, PlanRow, of_cases


@template.kept()
def run(
    plan: Plan,
    plugins: Plugins,
    names: tuple[str, ...],
    cache: Path,
    results: Path,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[Path, list[Record]]:
    """Try every case of a plan that can run here, but the controls, and write what came of it.

    Return the file and its records: one with the suite's title, and one for each case. Raise StoreError for results
    that cannot be written.
    """
    run_id = f"limits-{os.getpid()}"
    cases = [case for case in plan.cases if not case.is_control and obstacle(plugins, case) is None]
    folder = results / f"{plan.name}_limits" / facts.name()
    with locks.measuring(folder, plan.places):
        orphans.sweep()
        path = store.next_file(folder, facts.commit())
        records = [alone.complete(Record(heading=bench.heading(plan, plugins)), plan, run_id)]
        store.append(path, records[0])

        def measured(case: Case, budget: int) -> Record:
            log(f"running {case.label} on {case.place} within {budget >> 20:,} MiB")
            limited = case.model_copy(update={"budget_bytes": budget})
            record = alone.complete(alone.measured(limited, plan, plugins, names, cache, run_id), plan, run_id)
            store.append(path, record)
            return record

        log(f"predicting {len(cases)} cases")
        for row, trial in trials(of_cases(cases, plan, plugins, names, Machine()), measured):
            records.append(alone.complete(Record(case=row.case, trial=trial), plan, run_id))
            store.append(path, records[-1])
    return path, records


def trials(rows: Sequence[PlanRow], measured: Callable[[Case, int], Record]) -> Iterator[tuple[PlanRow, Trial]]:
    """Yield each row with what came of it; `measured` runs a case with a budget in bytes."""
    for row in rows:
        reason = row.reason or too_large(row)
        if row.peak_bytes is None or reason:
            yield row, Trial(predicted_peak_bytes=row.peak_bytes, reason=reason or "it cannot be predicted")
            continue
        at_point = measured(row.case, row.peak_bytes)
        at_most = measured(row.case, row.at_most_bytes) if row.at_most_bytes is not None else None
        yield (
            row,
            Trial(
                predicted_peak_bytes=row.peak_bytes,
                predicted_phase=row.phase,
                at_most_bytes=row.at_most_bytes,
                coverage=row.coverage,
                at_point=at_point.status,
                at_most=at_most.status if at_most is not None else None,
                peak_bytes=next((peak(each) for each in (at_most, at_point) if each and each.status == "ok"), None),
            ),
        )


def peak(record: Record) -> int | None:
    """Return the measured peak of a run, of the device where it has one."""
    return record.memory.peak_device_bytes or record.memory.peak_host_bytes


def too_large(row: PlanRow) -> str:
    """Return why a case is not run: it needs more than is free here; else an empty text."""
    free = facts.free_to_use()
    need = row.case.ranks * (row.need_bytes or 0)
    if row.case.place.device != "cpu" or need <= free:
        return ""
    return f"not run: it needs {need >> 20:,} MiB, and {free >> 20:,} MiB may be used here"
