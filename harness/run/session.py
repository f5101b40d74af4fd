"""Run a plan: each task in its turn, every attempt appended as it ends."""

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from harness.contract.assembly import probe_of
from harness.contract.plugins import Plugins
from harness.machine import checkups, facts, interference, orphans, throughput
from harness.machine.environment import cache_folder
from harness.records import Case, Kind, Record, Slot, Task, store
from harness.records.task import TokenFile
from harness.run import locks, predictions, prepare_data, runner, template, temporary
from harness.run.pacing import Pacing, pace, shuffled
from harness.run.schedule import Known, Latest, Schedule, is_done, obstacle
from harness.suite.plan import Group, Plan
from harness.verdicts import claims

ATTEMPTS = 2
MEMORY_SHARE = 0.8
REFERENCE_SECONDS = 300.0


@dataclass
class Progress:
    """What a watcher is told; the methods do nothing here."""

    def begin(self, total: int, done: int) -> None: ...

    def warn(self, sentence: str) -> None: ...

    def start(self, task: str, case: Case) -> None: ...

    def phase(self, name: str) -> None: ...

    def finish(self, record: Record, case: Case) -> None: ...


@dataclass(frozen=True)
class Options:
    """What the command line may change about a run, and nothing about what is measured."""

    results: Path
    plugins: tuple[str, ...] = ()
    rounds: int | None = None
    fresh: bool = False
    max_bytes: int | None = None
    try_all: bool = False
    all_rounds: bool = False
    cache: Path = field(default_factory=lambda: cache_folder())


def run(plan: Plan, plugins: Plugins, options: Options, progress: Progress) -> Path:
    """Run everything of a plan that has no result yet; return the results file.

    Raises SuiteError for a corpus that cannot serve, ClaimError for a claim that cannot be read, StoreError for results
    that cannot be written, all before anything is measured. Records are appended as they come; KeyboardInterrupt leaves
    all of them.
    """
    folder = options.results / plan.name / facts.name()
    with locks.measuring(folder, plan.suite.places), temporary.folder("harness-reference-") as reference:
        orphans.sweep()
        refuse_claims(plan)
        plan, found = prepare_data.prepare(plan, plugins, options.cache, lambda case: obstacle(plugins, case) is None)
        schedule = schedule_of(plan, plugins, options)

        def unfinished(latest: Latest) -> bool:
            return any(schedule.is_due(slot, latest) for slot in schedule.slots())

        path, latest = opened(folder, schedule, options.fresh, unfinished)
        run_id = new_id()
        store.append(path, beginning(schedule, run_id))
        planned = list(dict.fromkeys(schedule.slots()))
        progress.begin(len(planned), sum(not schedule.is_due(slot, latest) for slot in planned))

        def write(record: Record) -> None:
            store.append(path, record)

        Campaign(schedule, options, progress, run_id, reference, found, latest, write).measure()
        return path


def refuse_claims(plan: Plan) -> None:
    """Raise ClaimError for a claim that cannot be read, before anything is measured."""
    for claim in plan.suite.claims:
        claims.parsed(claim.that)


def schedule_of(plan: Plan, plugins: Plugins, options: Options, elsewhere: bool = False) -> Schedule:
    rounds = plan.suite.rounds if options.rounds is None else options.rounds
    return Schedule(plan, plugins, rounds, options.all_rounds, elsewhere)


def opened(
    folder: Path, schedule: Schedule, fresh: bool, unfinished: Callable[[Latest], bool]
) -> tuple[Path, dict[Slot, Known]]:
    """Continue the newest file when it holds some, but not all, of this very plan; else begin one."""
    files = sorted(folder.glob("*.jsonl"))
    if files and not fresh:
        found = store.read(files[-1])[0]
        latest = {record.slot: Known.of(record) for record in found if record.slot is not None}
        if any(record.plan == schedule.plan_digest for record in found) and unfinished(latest):
            return files[-1], latest
    return store.next_file(folder, facts.commit()), {}


def beginning(schedule: Schedule, run_id: str) -> Record:
    """Say what the suite says beside its cases: who reads the results need not have it."""
    plan = schedule.plan
    return Record(
        run_id=run_id,
        suite=plan.name,
        plan=schedule.plan_digest,
        utc=now(),
        title=plan.suite.title,
        claims=tuple(plan.suite.claims),
        machine=facts.facts(),
        versions=schedule.versions,
        commit=facts.commit(),
    )


@dataclass
class Campaign:
    """Groups of cases, measured on this machine; `write` is given every record as it comes.

    `latest` is what is known of the slots, from before and from this run.
    """

    schedule: Schedule
    options: Options
    progress: Progress
    run_id: str
    reference: Path
    corpora: dict[str, prepare_data.Corpus | None]
    latest: dict[Slot, Known]
    write: Callable[[Record], None]

    def __post_init__(self) -> None:
        self.plan, self.plugins = self.schedule.plan, self.schedule.plugins
        self.threads = len(os.sched_getaffinity(0))
        self.checkup = checkups.kept(self.options.cache)

    def is_open(self, slot: Slot) -> bool:
        record = self.latest.get(slot)
        return not is_done(record) and (record is None or record.attempt < ATTEMPTS or record.run_id != self.run_id)

    @template.kept()
    def measure(self) -> None:
        """Predict the cases of the plan, then measure each of its groups."""
        self.predict()
        self.foretell()
        for group in self.plan.groups:
            if (reason := self.schedule.obstacle(group.baseline)) is not None:
                for case in group.cases:
                    self.keep(
                        _unsupported(reason),
                        case,
                        Slot(case=self.schedule.digest(case), kind="memory"),
                    )
                continue
            for case in group.cases:
                self.numerics(case)
                self.memory(case)
            for number in range(self.rounds_of(group)):
                self.time_round(group, number)

    def rounds_of(self, group: Group) -> int:
        """Give the time rounds of a group: one where the baseline does not run, since no ratio can be formed.

        Unless all are asked for, to compare the rows with each other.
        """
        compared = self.options.all_rounds or self.measured(group.baseline)
        return self.schedule.rounds if compared else min(1, self.schedule.rounds)

    def predict(self) -> None:
        """Predict all open cases."""

        def slot(case: Case) -> Slot:
            return Slot(case=self.schedule.digest(case), kind="predict")

        cases = [case for case in self.plan.cases if self.is_open(slot(case))]
        for case in cases[:1]:
            self.progress.start("predict", case)
        seconds = min(predictions.SECONDS, self.plan.suite.timeout_seconds)
        told = self.options.plugins, self.run_id, self.progress.phase, seconds
        for case, record in predictions.of_cases(cases, self.corpora, self.plugins, *told):
            self.keep(record, case, slot(case))

    def foretell(self) -> None:
        """Say before anything runs which cases are predicted to take more than there is."""
        open_ = [case for case in self.plan.cases if self.schedule.obstacle(case) is None]
        over = [case for case in open_ if self.over_memory(case) is not None]
        if over:
            names = ", ".join(dict.fromkeys(case.label for case in over))
            told = "tried all the same" if self.options.try_all else "skipped (--try-all runs them)"
            self.progress.warn(
                f"{len(over)} of {len(open_)} cases are predicted to take more memory than may be used here, and are "
                f"{told}: {names[:200]}"
            )

    def numerics(self, case: Case) -> None:
        probe = probe_of(self.plugins, case)
        slot = Slot(case=self.schedule.digest(probe), kind="numerics")
        if not self.is_open(slot):
            return
        if (reason := self.schedule.obstacle(case)) is not None:
            self.keep(_unsupported(reason), probe, slot)
            return
        plain = probe.plain
        yardstick = self.reference / plain.digest()
        if not yardstick.exists():
            self.progress.start("reference", plain)
            self.work("reference", [plain], reference=str(yardstick), deadline=REFERENCE_SECONDS)
            if case.strategies:
                self.work("numerics", [plain], reference=str(yardstick), deadline=REFERENCE_SECONDS)
        self.progress.start("answer", case)
        self.keep(self.work("numerics", [probe], reference=str(yardstick))[0], probe, slot)

    def memory(self, case: Case) -> None:
        for repeat in range(self.schedule.repeats):
            slot = Slot(case=self.schedule.digest(case), kind="memory", repeat=repeat)
            if not self.is_open(slot):
                continue
            reason = self.schedule.obstacle(case)
            if reason is not None:
                self.keep(_unsupported(reason), case, slot)
            elif (guarded := self.guarded(case)) is not None:
                self.keep(guarded, case, slot)
            else:
                self.progress.start("memory", case)
                self.keep(self.work("memory", [case], steps=self.plan.suite.memory_steps, repeat=repeat)[0], case, slot)

    def guarded(self, case: Case) -> Record | None:
        """Refuse a case that would take the machine down, unless all are to be tried."""
        return None if self.options.try_all else self.over_memory(case)

    def over_memory(self, case: Case) -> Record | None:
        """Say of a case that it needs more than may be used, all ranks together; a budget bounds each already."""
        predicted = self.latest.get(Slot(case=self.schedule.digest(case), kind="predict"))
        if predicted is None or not case.place.endswith("/cpu"):
            return None
        need = case.ranks * min(predicted.need_bytes, case.budget_bytes or predicted.need_bytes)
        available = int(psutil.virtual_memory().available * MEMORY_SHARE)
        limit = min(available, self.options.max_bytes or available)
        if need <= limit:
            return None
        told = f"it needs about {need >> 20} MiB and {limit >> 20} MiB may be used here: set a budget, or shorten it"
        return Record(status="skipped_guard", evidence={"message": told, "need_bytes": need, "limit_bytes": limit})

    def time_round(self, group: Group, number: int) -> None:
        """Time every member once, in random order; a round that is not complete is run again whole."""
        members = [case for case in group.cases if self.measured(case)]
        slots = {case.label: Slot(case=self.schedule.digest(case), kind="time", round=number) for case in members}
        if not any(self.is_open(slot) for slot in slots.values()):
            return
        if self.timed_once(members, slots, number):
            self.timed_once(members, slots, number)

    def timed_once(self, members: list[Case], slots: dict[str, Slot], number: int) -> bool:
        """Time every member of a round; say whether something disturbed it, so that all of it is run again once."""
        by_label = {case.label: case for case in members}
        disturbed = False
        for label in shuffled(list(by_label), self.plan.suite.seed, number):
            case = by_label[label]
            pacing = self.pacing(case)
            self.progress.start(f"time {number + 1}/{self.schedule.rounds}", case)
            before = interference.snapshot()
            record = self.work("time", [case], steps=pacing.steps, warmup=pacing.warmup, round=number)[0]
            told = interference.disturbances(before, interference.snapshot())
            record = record.model_copy(update={"flags": (*record.flags, *pacing.flags, *told)})
            self.keep(record, case, slots[label])
            disturbed = disturbed or bool(told)
        return disturbed

    def measured(self, case: Case) -> bool:
        """Say whether the memory of a case was measured, so that it is worth timing."""
        record = self.latest.get(Slot(case=self.schedule.digest(case), kind="memory"))
        return record is not None and record.status == "ok"

    def pacing(self, case: Case) -> Pacing:
        """Take warm-up and steps from the suite, or find them once by a pilot and freeze them."""
        suite = self.plan.suite
        if suite.steps is not None and suite.warmup is not None:
            return Pacing(suite.warmup, suite.steps, ("few_steps",) if suite.steps < 10 else ())
        slot = Slot(case=self.schedule.digest(case), kind="pilot")
        if slot not in self.latest or not self.latest[slot].step_seconds:
            self.progress.start("pilot", case)
            self.keep(self.work("pilot", [case])[0], case, slot)
        if not self.latest[slot].step_seconds:
            return Pacing(2, 3, ("no_steady_state", "few_steps"))
        found = pace(self.latest[slot].step_seconds)
        return Pacing(suite.warmup or found.warmup, suite.steps or found.steps, found.flags)

    def work(self, kind: Kind, cases: Sequence[Case], deadline: float | None = None, **settings: Any) -> list[Record]:
        task = Task(
            kind=kind,
            cases=tuple(cases),
            run_id=self.run_id,
            parent=os.getpid(),
            folder="",
            corpora={case.group: self.corpora.get(case.group) for case in cases},
            plugins=self.options.plugins,
            **settings,
        )
        allowed = deadline or self.plan.suite.timeout_seconds
        return runner.run(task, self.threads, allowed, self.progress.phase)

    def keep(self, record: Record, case: Case, slot: Slot) -> None:
        """Complete a record, write it, and tell the watcher."""
        before = self.latest.get(slot)
        complete = record.model_copy(
            update={
                "run_id": self.run_id,
                "suite": self.plan.name,
                "plan": self.schedule.plan_digest,
                "slot": slot,
                "attempt": 1 if before is None else before.attempt + 1,
                "utc": now(),
                "position": self.schedule.positions.get(self.schedule.digest(case), -1),
                "case": case,
                "probe": self.schedule.digest(probe_of(self.plugins, case)) if slot.kind == "memory" else None,
                "machine": {
                    **facts.facts(),
                    **self.checkup,
                    **record.machine,
                    **self.rates(case, slot),
                },
                "versions": self.schedule.versions,
                "commit": facts.commit(),
                "batches_digest": _joined(record.batches_digests),
                "notes": {**record.notes, **self.notes(case)},
            }
        )
        self.write(complete)
        self.latest[slot] = Known.of(complete)
        self.progress.finish(complete, case)

    def rates(self, case: Case, slot: Slot) -> dict[str, Any]:
        """Give what the place of a predicted case does in a second, so that its work becomes time."""
        found = throughput.of_place(case.place, self.options.cache) if slot.kind == "predict" else None
        return {} if found is None else {"rates": found}

    def notes(self, case: Case) -> dict[str, str]:
        """Say what a reader of the record would not guess: a corpus that has fewer tokens than the model has rows."""
        corpus = self.corpora.get(case.group)
        rows = case.shape.get("vocabulary")
        if not isinstance(corpus, TokenFile) or not isinstance(rows, int) or corpus.vocabulary >= rows:
            return {}
        return {"vocabulary": f"the corpus gives {corpus.vocabulary} distinct tokens, the model has {rows} rows"}


def new_id() -> str:
    """Name a run: when it began, in which process, and by chance."""
    return f"{datetime.now(UTC):{store.STAMP}}-{os.getpid()}-{secrets.token_hex(3)}"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _unsupported(reason: str) -> Record:
    return Record(status="unsupported", evidence={"message": reason})


def _joined(digests: tuple[str, ...]) -> str | None:
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else None
