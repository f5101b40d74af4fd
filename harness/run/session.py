"""Run a plan: each task in its turn, every attempt appended as it ends."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness.contract.assembly import probe_of
from harness.contract.plugins import Plugins
from harness.machine import facts, gpu, orphans
from harness.records import Case, Heading, Kind, Record, Slot, store
from harness.records.record import OPEN_STATUSES
from harness.run import bench, locks, prediction_cache, prepare_data, repetitions, template, temporary
from harness.run.bench import Bench, Options, Progress
from harness.run.guards import guarded, over_memory
from harness.run.rounds import Rounds
from harness.run.schedule import Latest, Schedule, Summary, by_case, names, obstacle, worker_seconds
from harness.run.side_by_side import Result, Watch, shared_out
from harness.suite.plan import Comparison, Plan
from harness.verdicts import claims, expressions
from harness.verdicts.expressions import NAMES
from harness.verdicts.judge import judge

AT_ONCE = 8
"""Answers that are worked on at once, at most: each is a process with frameworks of its own."""
FILES = 3
"""Earlier results that are read to learn how long tasks take, at the most."""


def run(plan: Plan, plugins: Plugins, options: Options, progress: Progress) -> Path:
    """Run everything of a plan that has no result yet; return the results file.

    Raises SuiteError for a corpus that cannot serve, ClaimError for a claim that cannot be read, StoreError for results
    that cannot be written, all before anything is measured. Records are appended as they come; KeyboardInterrupt leaves
    all of them.
    """
    folder = options.results / plan.name / facts.name()
    with locks.measuring(folder, plan.places), temporary.folder("harness-reference-") as reference:
        orphans.sweep()
        orphans.start()
        refuse_claims(plan)
        plan, corpora = prepare_data.prepare(plan, plugins, options.cache, lambda case: obstacle(plugins, case) is None)
        progress.plan(plan)
        schedule = schedule_of(plan, plugins, options)

        path, latest, earlier = opened(folder, schedule, options, partial(has_more, schedule, options))
        run_id = bench.new_id(latest)
        store.append(path, beginning(schedule, run_id))
        timed = by_case(latest)
        progress.groups(
            [frozenset(map(schedule.digest, comparison.cases)) for comparison in plan.comparisons],
            [schedule.seconds_left(comparison.cases, timed) for comparison in plan.comparisons],
        )
        progress.places(schedule.places)
        progress.unsupported(schedule.obstructed)
        progress.earlier(seconds_before(schedule, folder, path))
        progress.begin(schedule.tasks(latest), schedule.there(latest))

        def write(record: Record) -> None:
            store.append(path, record)

        Session(schedule, options, progress, run_id, reference, corpora, latest, write, earlier).measure()
        return path


def refuse_claims(plan: Plan) -> None:
    """Raise ClaimError for a claim that cannot be read, before anything is measured."""
    for claim in plan.suite.claims:
        expressions.parsed(claim.that)


def schedule_of(plan: Plan, plugins: Plugins, options: Options, elsewhere: bool = False) -> Schedule:
    """Return what a run of a plan consists of, in the rounds of the options or of the suite."""
    rounds = plan.suite.rounds if options.rounds is None else options.rounds
    return Schedule(plan, plugins, rounds, options.all_rounds, elsewhere)


def has_more(schedule: Schedule, options: Options, latest: Latest, records: Sequence[Record] = ()) -> bool:
    """Check whether a run has something left to do, but for cases that would be skipped again.

    With its records, repetitions near a bound count as well.
    """
    for slot in schedule.due(latest):
        known = latest.get(slot)
        if known is None or known.status != "skipped_guard":
            return True
        predicted = latest.get(Slot(case=slot.case, kind="predict"))
        case = schedule.plan.cases[schedule.positions[slot.case]]
        if guarded(case, predicted, options, schedule.plan.suite) is None:
            return True
    return repetitions.are_missing(schedule, latest, records)


def opened(
    folder: Path, schedule: Schedule, options: Options, unfinished: Callable[[Latest, Sequence[Record]], bool]
) -> tuple[Path, dict[Slot, Summary], list[Record]]:
    """Return the file to write, what it says of its slots, and its records.

    It is the newest of this very plan when that has some, but not all, of it; else a new one. A file that has all of it
    is continued, with nothing left to do, where the options ask for results only `once`.
    """
    newest_first = sorted(folder.glob("*.jsonl"), reverse=True) if not options.fresh else []
    for file in (file for file in newest_first if _may_be_of(schedule, file)):
        records = store.read(file)[0]
        if any(record.origin.plan == schedule.plan_digest for record in records):
            latest = {record.slot: Summary.of(record) for record in records if record.slot is not None}
            if options.once or unfinished(latest, records):
                return file, latest, records
            break
    return store.next_file(folder, facts.commit()), {}, []


def seconds_before(schedule: Schedule, folder: Path, path: Path) -> dict[Slot, float]:
    """Return how long each task took in earlier results of a suite beside `path`, by the slot that it has today.

    The newest of this machine come first, then those of others: what is learned from them is corrected as the run goes
    on. Others are read as well where the first say nothing of some memory, up to `FILES` of them.
    """
    files = [file for file in folder.parent.glob("*/*.jsonl") if file != path]
    wanted = {slot for slot in schedule.slots() if slot.kind == "memory" and slot.case not in schedule.obstructed}
    known: dict[Slot, float] = {}
    for file in sorted(files, key=lambda file: (file.parent == folder, file.name), reverse=True)[:FILES]:
        if wanted <= known.keys():
            break
        known = _seconds_of(schedule, file) | known
    return known


def _seconds_of(schedule: Schedule, file: Path) -> dict[Slot, float]:
    """Return how long each task took in one file of results."""
    seconds: dict[Slot, float] = defaultdict(float)
    today: dict[str, str] = {}
    with suppress(store.StoreError):  # nothing is decided by them
        for record in store.read(file, schedule.plugins.aliases)[0]:
            if (slot := record.slot) is not None and record.case is not None:
                case = today.get(slot.case) or today.setdefault(slot.case, schedule.digest(record.case))
                seconds[slot.model_copy(update={"case": case, "block": 0})] += worker_seconds(record)
    return seconds


def _may_be_of(schedule: Schedule, file: Path) -> bool:
    """Check whether a file names the plan of a schedule: to parse those of a whole history would take long."""
    try:
        return schedule.plan_digest.encode() in file.read_bytes()
    except OSError:
        return True  # to read it says what is wrong


def beginning(schedule: Schedule, run_id: str) -> Record:
    """Return what the suite says beside its cases: who reads the results need not have it."""
    heading = bench.heading(schedule.plan, schedule.plugins, schedule.rounds)
    return Record(heading=heading, origin=bench.origin(schedule, run_id))


@dataclass
class Session(Bench):
    """Comparisons, predicted and measured one after the other; `earlier` are records of runs of the same plan."""

    earlier: Sequence[Record] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rounds = Rounds(self)
        self.in_claims = [Record(heading=Heading(rounds=self.schedule.rounds))]  # of rows that claims ask about
        self.unjudged: dict[str, Record] = {}  # that a workload gave no reference, by the digest of its untouched case

    @template.forking()
    def measure(self) -> None:
        """Predict and measure one comparison after the other."""
        for comparison in self.plan.comparisons:
            self.measure_group(comparison)
            self.progress.left(self.schedule.tasks(self.latest))
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
                if self.is_open(slot := self.slot(case, "memory")):
                    self.keep(_unsupported(reason), case, slot)
            return
        self.warn_of_memory(comparison)
        self.answers(comparison)
        for case in comparison.cases:
            self.memory(case)
            if case.is_baseline:  # one that cannot run takes all rounds but the first along
                self.progress.left(self.schedule.tasks(self.latest))
        self.repeat_near_bounds(comparison)
        self.rounds.time(comparison)

    def predict(self, comparison: Comparison) -> None:
        """Predict the open cases of a comparison, but for what an earlier run predicted with the same code."""
        slots = {case.digest(): self.slot(case, "predict") for case in comparison.cases}
        here = gpu.detect() if comparison.baseline.place.device == "cuda" else None
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
            seconds=self.schedule.allowed("predict"),
            steps=self.plan.suite.memory_steps,
        )
        with closing(predicted):  # an interruption ends the processes that predict the others
            for case, record in predicted:
                self.keep(record, case, slots[case.digest()])

    def warn_of_memory(self, comparison: Comparison) -> None:
        """Warn before a comparison is measured of its cases that are predicted to take more memory than may be used."""
        over = [case for case in comparison.cases if self.over_memory(case) is not None]
        tried = [case for case in over if self.guarded(case) is None]
        remedy = " (--try-all runs them)" if self.options.max_bytes is None else ""
        skipped = [case for case in over if case not in tried]
        for cases, action in ((skipped, f"skipped{remedy}"), (tried, "tried all the same")):
            if cases:
                self.progress.warn(
                    f"{len(cases)} of {len(comparison.cases)} cases are predicted to take more memory than may be used "
                    f"here, and are {action}: {', '.join(case.label for case in cases)[:200]}"
                )

    def answers(self, comparison: Comparison) -> None:
        """Compare the answer of each case with that of the untouched workload, unless another with its probe has been.

        Several are worked on at once, since nothing of them is measured, but on a GPU that takes one process at a time;
        the untouched one comes first.
        """
        probes = {case.digest(): probe_of(self.plugins, case) for case in comparison.cases}
        judged: dict[Slot, Case] = {}
        for case in comparison.cases:
            probe = probes[case.digest()]
            if not self.has_yardstick(case, probe):
                continue
            slot = self.slot(probe, "numerics")
            if not case.is_baseline:
                judged.setdefault(slot, case)
                continue
            answer = self.judged(probe, self.progress.phase)
            self.keep(answer, probe, slot)
            if answer.status != "ok":
                self.unjudged[probe.plain.digest()] = _unjudged(answer)

        def one_after_another(share: Sequence[Case], watch: Watch) -> Iterator[Result]:
            for case in share:
                yield case, self.judged(probes[case.digest()], watch)

        one_at_a_time = comparison.baseline.place.device == "cuda" and gpu.is_exclusive()
        at_once = 1 if one_at_a_time else AT_ONCE
        with closing(shared_out(list(judged.values()), one_after_another, self.progress.phase, at_once)) as answers:
            for case, answer in answers:
                self.keep(answer, probes[case.digest()], self.slot(probes[case.digest()], "numerics"))

    def has_yardstick(self, case: Case, probe: Case) -> bool:
        """Check whether the answer of an open case can be judged, and make what it is judged by; else say why not."""
        slot = self.slot(probe, "numerics")
        if not self.is_open(slot):
            return False
        if (reason := self.schedule.obstacle(case)) is not None:
            self.keep(_unsupported(reason), probe, slot)
            return False
        plain = probe.plain
        yardstick = self.yardstick(probe)
        if not yardstick.exists() and plain.digest() not in self.unjudged:
            self.progress.start("reference", plain)
            kinds: tuple[Kind, ...] = ("reference", "numerics") if case.strategies else ("reference",)
            deadline = self.schedule.allowed("reference")
            for kind in kinds:
                [made] = self.work(kind, [plain], reference=str(yardstick), deadline=deadline)
                if made.status != "ok":
                    self.unjudged[plain.digest()] = _unjudged(made)
                    break
        if (unjudged := self.unjudged.get(plain.digest())) is not None:
            self.keep(unjudged, probe, slot)
            return False
        return True

    def yardstick(self, probe: Case) -> Path:
        """Return the folder of what the answer of a probe is judged by."""
        return self.reference / probe.plain.digest()

    def judged(self, probe: Case, watch: Watch) -> Record:
        """Return the answer of a probe, judged."""
        self.progress.start("answer", probe)
        [answer] = self.work("numerics", [probe], watch=watch, reference=str(self.yardstick(probe)))
        return answer

    def memory(self, case: Case, times: int = 1) -> None:
        """Measure the memory of a case as often as is wanted, once where it does not run, or say why not."""
        for repeat in range(times):
            if repeat and self.schedule.cannot_run(self.schedule.digest(case), self.latest):
                return
            slot = self.slot(case, "memory", repeat=repeat)
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
        """Measure those rows again whose peak is so near to a bound that one run cannot say on which side it lies.

        That of `less` or `more`, or that of a claim. A claim about several comparisons is decided with the last of
        them, which a machine of a cluster need not have.
        """
        words = self.near_words(comparison) if self.schedule.rounds else []
        near = {self.schedule.digest(case): case for case in [*words, *self.near_claims(comparison)]}
        runs = [case for digest, case in near.items() if not self.schedule.cannot_run(digest, self.latest)]
        open_ = filter(self.is_open, repetitions.slots_of(self.schedule, runs, self.latest))
        self.progress.repeated(set(map(self.schedule.digest, comparison.cases)), list(open_))
        for case in near.values():
            self.memory(case, repetitions.REPEATS)

    def near_words(self, comparison: Comparison) -> list[Case]:
        """Return the rows of a comparison near the bound of `less` or `more`, and its baseline with them."""
        tables = repetitions.judged([*self.earlier_of(comparison), *self.records])
        key = comparison.baseline.comparison_key
        return [case for table in tables if table.case.comparison_key == key for case in repetitions.near_words(table)]

    def near_claims(self, comparison: Comparison) -> list[Case]:
        """Return the rows near the bound of a claim, of this comparison and of those that were measured before."""
        asked = claims.asked(self.plan.suite.claims, comparison.baseline, NAMES)
        if not asked:
            return []
        self.in_claims += [
            record
            for record in [*self.earlier_of(comparison), *self.records]
            if record.slot is not None and record.slot.kind in ("predict", "memory") and record.case is not None
            if record.case.is_baseline or names(record.case) & asked
        ]
        return repetitions.near_claims(self.plan.suite.claims, judge(self.in_claims))

    def guarded(self, case: Case) -> Record | None:
        """Return the record of a case that is not begun; None for others."""
        return guarded(case, self.known(case, "predict"), self.options, self.plan.suite)

    def over_memory(self, case: Case) -> Record | None:
        """Return the record of a case that needs more than may be used; None for others."""
        return over_memory(case, self.known(case, "predict"), self.options)


def _unsupported(reason: str) -> Record:
    return Record(status="unsupported", evidence={"message": reason})


def _unjudged(made: Record) -> Record:
    """Return the record of an answer that has no reference: a later run tries it again where it tries that again."""
    fault = made.evidence.get("message", made.status)
    message = f"its answer cannot be judged, since the untouched workload gave no reference: {fault}"
    if made.status == "timeout":
        return Record(status="timeout", evidence={"message": message, "seconds": made.evidence.get("seconds")})
    status = made.status if made.status in OPEN_STATUSES else "error"
    return Record(status=status, evidence={"message": message})
