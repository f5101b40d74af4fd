"""Run a plan: each task in its turn, every attempt appended as it ends."""

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from harness import backends
from harness.contract.assembly import environment_of, probe_of
from harness.contract.plugins import Plugins
from harness.machine import checkups, facts, gpu, interference, orphans
from harness.machine.environment import cache_folder
from harness.records import Case, Heading, Kind, Origin, Record, Slot, Task, store
from harness.records.task import TokenFile
from harness.run import locks, prediction_cache, predictions, prepare_data, runner, template, temporary, turns
from harness.run.pacing import UNKNOWN, Pacing, pace
from harness.run.schedule import REPEATS, Known, Latest, Schedule, by_case, is_done, obstacle
from harness.suite.plan import Comparison, Plan
from harness.verdicts import blocks, expressions
from harness.verdicts.judge import MEMORY_MARGIN

ATTEMPTS = 2
HOPELESS = 4
"""Processes timed alone that were disturbed, run again and disturbed again, after which a run times none twice."""
REFERENCE_SECONDS = 300.0
OF_A_PROCESS = 256 << 20
"""What a process takes beside its peak, in bytes: interpreter and frameworks."""


@dataclass
class Progress:
    """What a watcher is told; the methods do nothing here."""

    def groups(self, groups: Sequence[frozenset[str]], seconds: float) -> None:
        """Hear which cases are timed together, by digest, and how long the rounds of such a group may take."""

    def unsupported(self, cases: frozenset[str]) -> None:
        """Hear which cases cannot run here, by digest: each gets a record that says so, and takes no time."""

    def begin(self, slots: Sequence[Slot], done: int) -> None: ...

    def left(self, slots: Sequence[Slot]) -> None: ...

    def comparison(self, comparison: Comparison, records: Sequence[Record]) -> None: ...

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
    once: bool = False
    cache: Path = field(default_factory=lambda: cache_folder())


def run(plan: Plan, plugins: Plugins, options: Options, progress: Progress) -> Path:
    """Run everything of a plan that has no result yet; return the results file.

    Raises SuiteError for a corpus that cannot serve, ClaimError for a claim that cannot be read, StoreError for results
    that cannot be written, all before anything is measured. Records are appended as they come; KeyboardInterrupt leaves
    all of them.
    """
    folder = options.results / plan.name / facts.name()
    with locks.measuring(folder, plan.places), temporary.folder("harness-reference-") as reference:
        orphans.sweep()
        refuse_claims(plan)
        plan, corpora = prepare_data.prepare(plan, plugins, options.cache, lambda case: obstacle(plugins, case) is None)
        schedule = schedule_of(plan, plugins, options)

        path, latest, earlier = opened(folder, schedule, options, lambda latest: bool(schedule.due(latest)))
        run_id = new_id()
        store.append(path, beginning(schedule, run_id))
        progress.groups(
            [frozenset(map(schedule.digest, comparison.cases)) for comparison in plan.comparisons],
            60 * plan.suite.timing_minutes,
        )
        progress.unsupported(
            frozenset(schedule.digest(case) for case in plan.cases if schedule.obstacle(case) is not None)
        )
        progress.begin(schedule.due(latest), len(latest))

        def write(record: Record) -> None:
            store.append(path, record)

        Session(schedule, options, progress, run_id, reference, corpora, latest, write, earlier).measure()
        return path


def refuse_claims(plan: Plan) -> None:
    """Raise ClaimError for a claim that cannot be read, before anything is measured."""
    for claim in plan.suite.claims:
        expressions.parsed(claim.that)


def schedule_of(plan: Plan, plugins: Plugins, options: Options, elsewhere: bool = False) -> Schedule:
    rounds = plan.suite.rounds if options.rounds is None else options.rounds
    return Schedule(plan, plugins, rounds, options.all_rounds, elsewhere)


def opened(
    folder: Path, schedule: Schedule, options: Options, unfinished: Callable[[Latest], bool]
) -> tuple[Path, dict[Slot, Known], list[Record]]:
    """Return the file to write, what it says of its slots, and its records.

    It is the newest when that has some, but not all, of this very plan; else a new one. A file that has all of it is
    continued, with nothing left to do, where the options ask for results only `once`.
    """
    files = sorted(folder.glob("*.jsonl"))
    if files and not options.fresh:
        records = store.read(files[-1])[0]
        latest = {record.slot: Known.of(record) for record in records if record.slot is not None}
        same = any(record.origin.plan == schedule.plan_digest for record in records)
        if same and (options.once or unfinished(latest)):
            return files[-1], latest, records
    return store.next_file(folder, facts.commit()), {}, []


def beginning(schedule: Schedule, run_id: str) -> Record:
    """Return what the suite says beside its cases: who reads the results need not have it."""
    plan = schedule.plan
    heading = Heading(title=plan.suite.title, claims=tuple(plan.suite.claims), rounds=schedule.rounds)
    return Record(heading=heading, origin=origin(schedule, run_id))


def origin(schedule: Schedule, run_id: str) -> Origin:
    """Return what all records of a run share."""
    return Origin(
        run_id=run_id,
        suite=schedule.plan.name,
        plan=schedule.plan_digest,
        utc=now(),
        machine=facts.facts(),
        versions=schedule.versions,
        commit=facts.commit(),
    )


@dataclass
class Session:
    """Comparisons, measured on this machine; `write` gets every record as it comes.

    `latest` is what is known of the slots, from before and from this run; `records` are those of this run that the
    table of the comparison at hand is made from.
    """

    schedule: Schedule
    options: Options
    progress: Progress
    run_id: str
    reference: Path
    corpora: dict[str, prepare_data.Corpus | None]
    latest: dict[Slot, Known]
    write: Callable[[Record], None]
    earlier: Sequence[Record] = ()

    def __post_init__(self) -> None:
        self.plan, self.plugins = self.schedule.plan, self.schedule.plugins
        self.threads = len(os.sched_getaffinity(0))
        self.checkup = checkups.kept(self.options.cache)
        self.records = [Record(heading=Heading(rounds=self.schedule.rounds))]
        self.disturbed_twice = 0
        self.unjudged: dict[str, str] = {}  # why a workload gave no reference, by the digest of its untouched case

    def is_open(self, slot: Slot) -> bool:
        record = self.latest.get(slot)
        return not is_done(record) and (record is None or record.attempt < ATTEMPTS or record.run_id != self.run_id)

    @template.kept()
    def measure(self) -> None:
        """Predict and measure one comparison after the other."""
        for comparison in self.plan.comparisons:
            self.measure_group(comparison)
            self.progress.left(self.schedule.due(self.latest))
            self.progress.comparison(comparison, [*self.earlier_of(comparison), *self.records])
            self.records = [record for record in self.records if record.slot is None or record.slot.kind == "numerics"]

    def earlier_of(self, comparison: Comparison) -> list[Record]:
        """Return what earlier runs of the same plan wrote of a comparison, answers of all included."""
        key = comparison.baseline.comparison_key
        return [
            record
            for record in self.earlier
            if record.case and record.slot and (record.slot.kind == "numerics" or record.case.comparison_key == key)
        ]

    def measure_group(self, comparison: Comparison) -> None:
        """Predict a comparison, then measure its answers, its memory and its times."""
        self.predict(comparison)
        if (reason := self.schedule.obstacle(comparison.baseline)) is not None:
            for case in comparison.cases:
                self.keep(_unsupported(reason), case, Slot(case=self.schedule.digest(case), kind="memory"))
            return
        self.warn_of_memory(comparison)
        for case in comparison.cases:
            self.numerics(case)
            self.memory(case)
            if case.is_baseline:  # one that cannot run takes all rounds but the first along
                self.progress.left(self.schedule.due(self.latest))
        self.repeat_near_bounds(comparison)
        self.time(comparison)

    def predict(self, comparison: Comparison) -> None:
        """Predict the open cases of a comparison, but for what an earlier run predicted with the same code."""
        slots = {case.digest(): Slot(case=self.schedule.digest(case), kind="predict") for case in comparison.cases}
        here = gpu.seen() if comparison.baseline.place.device == "cuda" else None
        cases = [case for case in comparison.cases if self.is_open(slots[case.digest()])]
        if not cases:
            return
        self.progress.start("predict", cases[0])
        predicted = prediction_cache.of_cases(
            cases,
            prediction_cache.folder(self.options.cache),
            self.corpora,
            self.plugins,
            self.options.plugins,
            card=here.name if here is not None else "",
            run_id=self.run_id,
            watch=self.progress.phase,
            seconds=min(predictions.SECONDS, self.plan.suite.timeout_seconds),
        )
        for case, record in predicted:
            self.keep(record, case, slots[case.digest()])

    def warn_of_memory(self, comparison: Comparison) -> None:
        """Warn before a comparison is measured of its cases that are predicted to take more memory than may be used."""
        over = [case.label for case in comparison.cases if self.over_memory(case) is not None]
        if over:
            action = "tried all the same" if self.options.try_all else "skipped (--try-all runs them)"
            self.progress.warn(
                f"{len(over)} of {len(comparison.cases)} cases are predicted to take more memory than may be used "
                f"here, and are {action}: {', '.join(over)[:200]}"
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
        if not yardstick.exists() and plain.digest() not in self.unjudged:
            self.progress.start("reference", plain)
            kinds: tuple[Kind, ...] = ("reference", "numerics") if case.strategies else ("reference",)
            for kind in kinds:
                [made] = self.work(kind, [plain], reference=str(yardstick), deadline=REFERENCE_SECONDS)
                if made.status != "ok":
                    self.unjudged[plain.digest()] = str(made.evidence.get("message", made.status))
                    break
        if (fault := self.unjudged.get(plain.digest())) is not None:
            message = f"its answer cannot be judged, since the untouched workload gave no reference: {fault}"
            self.keep(Record(status="error", evidence={"message": message}), probe, slot)
            return
        self.progress.start("answer", case)
        self.keep(self.work("numerics", [probe], reference=str(yardstick))[0], probe, slot)

    def memory(self, case: Case, repeats: int | None = None) -> None:
        """Measure the memory of a case as often as is wanted, once where it does not run, or say why not."""
        for repeat in range(self.schedule.repeats(case) if repeats is None else repeats):
            if repeat and self.schedule.cannot_run(self.schedule.digest(case), self.latest):
                return
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
                self.keep(self.work("memory", [case], steps=self.plan.suite.memory_steps)[0], case, slot)

    def repeat_near_bounds(self, comparison: Comparison) -> None:
        """Measure those rows again whose peak is so near to the bound of `less` or `more` that one run cannot say."""
        peaks = {case.label: self.peak(case) for case in comparison.cases}
        baseline = peaks.get(comparison.baseline.label)
        if baseline is None or not self.schedule.rounds:
            return
        bound = MEMORY_MARGIN * baseline
        near = [
            case
            for case in comparison.cases
            if (peak := peaks[case.label]) is not None and abs(abs(peak - baseline) - bound) < bound / 2
        ]
        for case in [comparison.baseline, *near] if near else []:
            self.memory(case, REPEATS)

    def peak(self, case: Case) -> int | None:
        """Return the measured peak of a case in bytes."""
        known = self.latest.get(Slot(case=self.schedule.digest(case), kind="memory"))
        return None if known is None or known.status != "ok" else known.peak_bytes

    def guarded(self, case: Case) -> Record | None:
        """Refuse a case that would take the machine down, unless all are to be tried."""
        return None if self.options.try_all else self.over_memory(case)

    def over_memory(self, case: Case) -> Record | None:
        """Return the record of a case that needs more than may be used, all ranks together; None for others."""
        predicted = self.latest.get(Slot(case=self.schedule.digest(case), kind="predict"))
        if predicted is None:
            return None
        need = min(predicted.need_bytes, case.budget_bytes or predicted.need_bytes)
        if case.place.device == "cpu":
            need *= case.ranks  # each has a GPU of its own, but they share the host
            available: int | None = int(psutil.virtual_memory().available * facts.HOST_SHARE)
        else:
            available = gpu.free_to_use()
        if available is None:
            return None
        limit = min(available, self.options.max_bytes or available)
        if need <= limit:
            return None
        message = f"it needs about {need >> 20} MiB and {limit >> 20} MiB may be used here: set a budget, or shorten it"
        return Record(status="skipped_guard", evidence={"message": message, "need_bytes": need, "limit_bytes": limit})

    def time(self, comparison: Comparison) -> None:
        """Time a comparison round by round, until all its rows are decided or the suite's time is spent."""
        tried: Counter[int] = Counter()
        while True:
            number, members = self.schedule.turn(comparison, self.latest, by_case(self.latest))
            members = [case for case in members if self.measured(case)]
            if not members or tried[number] == ATTEMPTS:
                return
            tried[number] += 1
            self.time_round(comparison, number, members)

    def time_round(self, comparison: Comparison, number: int, members: list[Case]) -> None:
        """Time every member once, in random order, in blocks of neighbours in time with the baseline in each."""
        by_label = {case.label: case for case in members}
        for case in members:
            self.pacing(case)  # pilots come first: what they show cuts the blocks
        free = psutil.virtual_memory().available * facts.HOST_SHARE
        turning = {
            case.label: room
            for case in members
            if self.takes_turns(case) and (room := self.room(case)) <= free / blocks.LEAST
        }
        cut = blocks.blocks(
            list(by_label),
            {label: seconds for label, case in by_label.items() if (seconds := self.share_of_block(case))},
            f"{self.plan.suite.seed}/{comparison.baseline.comparison_key}",
            number,
            sizes=turning,
            room=free,
        )
        for block, labels in enumerate(cut):
            slots = {
                label: Slot(case=self.schedule.digest(by_label[label]), kind="time", round=number, block=block)
                for label in labels
            }
            together = [label for label in labels if label in turning]
            if len(together) > 1:  # what disturbs them meets all of them alike
                self.time_together([(by_label[label], slots[label]) for label in together])
            for label in labels if len(together) < 2 else [label for label in labels if label not in turning]:
                if self.time_alone(by_label[label], slots[label]) and self.disturbed_twice < HOPELESS:
                    self.disturbed_twice += self.time_alone(by_label[label], slots[label])

    def time_alone(self, case: Case, slot: Slot) -> bool:
        """Time one process; return whether something disturbed it."""
        return self.time_together([(case, slot)])

    def takes_turns(self, case: Case) -> bool:
        """Check whether a case is one process on the CPU that can be stopped, and needs no machine to itself."""
        alone = any(self.plugins.strategies[each.name].is_alone(each.knobs) for each in case.strategies)
        return case.place.device == "cpu" and backends.processes(case.place.backend, case.ranks) == 1 and not alone

    def room(self, case: Case) -> int:
        """Return about how much memory a timed process of a case takes in bytes, its ranks and children with it."""
        known = self.latest.get(Slot(case=self.schedule.digest(case), kind="memory"))
        return OF_A_PROCESS + (self.peak(case) or 0) * case.ranks + (known.children_bytes if known is not None else 0)

    def time_together(self, timed: Sequence[tuple[Case, Slot]]) -> bool:
        """Time processes in turns; return whether something disturbed them."""
        pacings = [self.pacing(case) for case, _ in timed]
        seed = f"{self.plan.suite.seed}/{timed[0][0].comparison_key}/{timed[0][1].round}/{timed[0][1].block}"
        tasks = [
            self.task(
                "time", [case], steps=pacing.steps, warmup=pacing.warmup, turns=turns.TURNS if len(timed) > 1 else 1
            )
            for (case, _), pacing in zip(timed, pacings, strict=True)
        ]

        def starting(number: int) -> None:
            case, slot = timed[number]
            self.progress.start(f"time {slot.round + 1}/{self.schedule.rounds}", case)

        before = interference.snapshot(timed[0][0].place)
        allowed = self.plan.suite.timeout_seconds
        records = turns.run(tasks, self.threads, allowed, self.progress.phase, Random(seed), starting)
        disturbances = interference.disturbances(before, interference.snapshot(timed[0][0].place))
        for (case, slot), pacing, record in zip(timed, pacings, records, strict=True):
            flags = (*record.flags, *pacing.flags, *disturbances)
            self.keep(record.model_copy(update={"flags": flags}), case, slot)
        return bool(disturbances)

    def share_of_block(self, case: Case) -> float:
        """Return how long a process of a case keeps others waiting, as far as is known, in seconds.

        Where it takes turns these are its timed steps, since all others of the block have started before; else it is
        its life.
        """
        digest = self.schedule.digest(case)
        timed = [known for known in by_case(self.latest).get(digest, {}).values() if known.seconds is not None]
        memory = self.latest.get(Slot(case=digest, kind="memory"))
        pilot = self.latest.get(Slot(case=digest, kind="pilot"))
        turning = self.takes_turns(case)
        if timed:
            return median(known.timed_seconds if turning else known.worker_seconds for known in timed)
        if turning and pilot is not None and pilot.step_seconds:
            return median(pilot.step_seconds) * self.pacing(case).steps
        return memory.worker_seconds if memory is not None else 0.0

    def measured(self, case: Case) -> bool:
        """Check whether the memory of a case was measured, so that it is worth timing."""
        record = self.latest.get(Slot(case=self.schedule.digest(case), kind="memory"))
        return record is not None and record.status == "ok"

    def pacing(self, case: Case) -> Pacing:
        """Take warm-up and steps from the suite, or find them once by a pilot and freeze them."""
        suite = self.plan.suite
        if suite.steps is not None and suite.warmup is not None:
            return Pacing(suite.warmup, suite.steps)
        slot = Slot(case=self.schedule.digest(case), kind="pilot")
        if slot not in self.latest or not self.latest[slot].step_seconds:
            self.progress.start("pilot", case)
            self.keep(self.work("pilot", [case])[0], case, slot)
        turns_of = turns.TURNS if self.takes_turns(case) else 1
        paced = pace(pilot, turns_of) if (pilot := self.latest[slot].step_seconds) else UNKNOWN
        return Pacing(paced.warmup if suite.warmup is None else suite.warmup, suite.steps or paced.steps, paced.flags)

    def work(self, kind: Kind, cases: Sequence[Case], deadline: float | None = None, **settings: Any) -> list[Record]:
        allowed = deadline or self.plan.suite.timeout_seconds
        return runner.run(self.task(kind, cases, **settings), self.threads, allowed, self.progress.phase)

    def task(self, kind: Kind, cases: Sequence[Case], **settings: Any) -> Task:
        """Return what a worker of this run is to do; all cases have the environment of the first."""
        return Task(
            kind=kind,
            cases=tuple(cases),
            run_id=self.run_id,
            parent=os.getpid(),
            folder="",
            corpora={case.comparison_key: self.corpora.get(case.comparison_key) for case in cases},
            plugins=self.options.plugins,
            environment=environment_of(self.plugins, cases[0]) if kind in ("memory", "pilot", "time") else {},
            **settings,
        )

    def keep(self, record: Record, case: Case, slot: Slot) -> None:
        """Complete a record, write it, and tell the watcher."""
        before = self.latest.get(slot)
        machine = {**facts.facts(), **self.checkup, **record.origin.machine}
        attempt = 1 if before is None else before.attempt + 1
        known = {
            "attempt": attempt,
            "machine": machine,
            "worker_seconds": record.origin.worker_seconds,
            "start": record.origin.start,
        }
        digest = _joined(record.memory.batches_digests)
        complete = record.model_copy(
            update={
                "origin": origin(self.schedule, self.run_id).model_copy(update=known),
                "slot": slot,
                "position": self.schedule.positions.get(self.schedule.digest(case), -1),
                "case": case,
                "probe": self.schedule.digest(probe_of(self.plugins, case)) if slot.kind == "memory" else None,
                "memory": record.memory.model_copy(update={"batches_digest": digest}) if digest else record.memory,
                "notes": {**record.notes, **self.notes(case)},
            }
        )
        self.write(complete)
        self.records.append(complete)
        self.latest[slot] = Known.of(complete)
        self.progress.finish(complete, case)

    def notes(self, case: Case) -> dict[str, str]:
        """Return what a reader would not guess: that a corpus has fewer tokens than the model has rows."""
        corpus = self.corpora.get(case.comparison_key)
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
