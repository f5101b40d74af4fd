"""Predict the cases of a finished run again where the code that predicts is another now, and what measures is not.

What was measured stands, so that a better predictor takes minutes and no new measurement. The new predictions are
appended to the file and take the place of the former ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.contract.plugins import Plugins
from harness.machine import facts, history
from harness.records import Record, Slot, store
from harness.records.record import heading_of
from harness.run import bench, digests, locks, prepare_data, session
from harness.run.bench import Options, Progress
from harness.run.schedule import Schedule, Summary
from harness.suite.plan import Plan


def run(plan: Plan, plugins: Plugins, options: Options, progress: Progress) -> Path | None:
    """Return the newest results of a plan where nothing of them is to be measured anew, predicted by today's code.

    None where a run is to measure: there are no results of all its cases, in as many steps and rounds, by the versions
    that are installed, something of them is missing, their texts or frames lie in files that may be others by now, or
    code that measures or is measured does something else today. Raises as `session.run` does.
    """
    folder = options.results / plan.name / facts.name()
    files = sorted(folder.glob("*.jsonl"), reverse=True)
    if not files:
        return None
    with locks.measuring(folder, plan.places):
        session.refuse_claims(plan)
        plan, corpora = prepare_data.prepare(
            plan, plugins, options.cache, lambda case: session.obstacle(plugins, case) is None
        )
        progress.plan(plan)
        schedule = session.schedule_of(plan, plugins, options)
        runs = ((file, store.read(file, plugins.aliases)[0]) for file in files)
        whole = next((run for run in runs if is_of(schedule, run[1])), None)
        if whole is None:
            return None
        file, records = whole
        suite = plan.suite
        roles = history.since(records, plugins.strategies)
        if roles is None or roles.run or roles.measuring:
            return None
        may_resume = any(record.origin.plan == schedule.plan_digest for record in records)
        schedule = replace(schedule, known=slots_of(records))
        latest = {record.slot: Summary.of(record) for record in records if record.slot is not None}
        if session.has_more(schedule, options, latest, records if may_resume else ()):
            return None
        if roles.predicting:
            _append(file, schedule, options, progress, corpora)
        elif (known := heading_of(records)).title != suite.title or known.claims != tuple(suite.claims):
            store.append(file, session.beginning(schedule, bench.new_id()))
        return file


def is_of(schedule: Schedule, records: Sequence[Record]) -> bool:
    """Check whether records are a whole run of a schedule, by the versions that are installed."""
    suite, root = schedule.plan.suite, schedule.plan.path.resolve().parent
    measured = [record for record in records if record.slot is not None and record.slot.kind == "memory"]
    cases = {record.case.digest() for record in measured if record.case is not None}
    steps = {len(record.step_losses) for record in measured if record.memory.losses}
    timed = [record.times for record in records if record.status == "ok" and _of_suite(record)]
    rounds = {record.heading.rounds for record in records if record.heading.code}
    return (
        cases == {case.digest() for case in schedule.plan.cases}
        and not any(digests.of_corpus(case.corpus, root) for case in schedule.plan.cases)
        and steps <= {suite.memory_steps}
        and (suite.steps is None or {len(times.step_seconds) for times in timed} <= {suite.steps})
        and (suite.warmup is None or {times.warmup_steps for times in timed} <= {suite.warmup})
        and rounds == {schedule.rounds}
        and all(record.origin.versions == schedule.versions for record in measured)
    )


def _of_suite(record: Record) -> bool:
    """Check whether a record has times of as many steps as the suite asks for; of uneven batches it has an epoch's."""
    return record.slot is not None and record.slot.kind == "time" and not record.times.uneven


def slots_of(records: Sequence[Record]) -> dict[str, str]:
    """Return what slots name their cases by, by the digest of the case alone."""
    return {
        record.case.digest(): record.slot.case
        for record in records
        if record.case is not None and record.slot is not None
    }


def _append(
    path: Path,
    schedule: Schedule,
    options: Options,
    progress: Progress,
    corpora: dict[str, prepare_data.Corpus | None],
) -> None:
    run_id = bench.new_id()
    store.append(path, session.beginning(schedule, run_id))
    progress.begin([Slot(case=schedule.digest(case), kind="predict") for case in schedule.plan.cases], 0)

    def write(record: Record) -> None:
        store.append(path, record)

    predicting = session.Session(schedule, options, progress, run_id, path.parent, corpora, {}, write)
    with session.template.forking():
        for comparison in schedule.plan.comparisons:
            predicting.predict(comparison)
