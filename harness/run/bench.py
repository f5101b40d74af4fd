"""What a run measures with: one task in a worker of its own, and its record, complete and written."""

import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.contract.assembly import environment_of
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import checkups, facts, history
from harness.machine.environment import cache_folder
from harness.records import Case, Heading, Kind, Origin, Record, Slot, Task, store
from harness.records.task import TokenFile
from harness.run import prepare_data, runner
from harness.run.schedule import Latest, Schedule, Summary
from harness.suite.plan import Comparison, Plan

ATTEMPTS = 2


@dataclass
class Progress:
    """What a watcher hears of a run; the methods do nothing here."""

    def plan(self, plan: Plan) -> None:
        """Hear what will be measured: a vocabulary of 0 is as many tokens as the corpus has by now."""

    def groups(self, groups: Sequence[frozenset[str]], seconds: Sequence[float]) -> None:
        """Hear which cases are timed together, by digest, and how long the rounds of each may take from now on."""

    def places(self, places: Mapping[str, Place]) -> None:
        """Hear where each case runs, by digest, and each of those in which answers are compared."""

    def unsupported(self, cases: frozenset[str]) -> None:
        """Hear which cases cannot run here, by digest: each gets a record that says so, and takes no time."""

    def earlier(self, seconds: Mapping[Slot, float]) -> None:
        """Hear how long each task took in earlier results, by the slot that it has today."""

    def repeated(self, cases: Collection[str], slots: Sequence[Slot]) -> None:
        """Hear what of a comparison, given by its digests, is measured again: none where no row is near a bound."""

    def timed(self, cases: Collection[str], number: int, members: Collection[str]) -> None:
        """Hear that a round of a comparison begins, and which of its cases, by digest, are still timed."""

    def predicting(self, cases: int) -> None:
        """Hear how many cases are predicted before any is run; of a search nobody knows it."""

    def predicted(self, case: Case) -> None:
        """Hear that a case is predicted."""

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


def heading(plan: Plan, plugins: Plugins, rounds: int = 0) -> Heading:
    """Return what a suite says beside its cases, and digests of the code that decides their figures."""
    names = dict.fromkeys(applied.name for case in plan.cases for applied in case.strategies)
    code = history.digests(history.files_of(plugins.strategies[name] for name in names))
    claims = tuple(plan.suite.claims)
    return Heading(title=plan.suite.title, asked=plan.asked, claims=claims, rounds=rounds, code=code)


@dataclass
class Bench:
    """Where the cases of a plan are measured on this machine; `write` gets every record as it comes.

    `latest` is what is known of the slots, from before and from this run; `records` are those of this run that the
    table of the comparison at hand is made from.
    """

    schedule: Schedule
    options: Options
    progress: Progress
    run_id: str
    reference: Path
    corpora: dict[str, prepare_data.Corpus | None]
    latest: dict[Slot, Summary]
    write: Callable[[Record], None]

    def __post_init__(self) -> None:
        self.plan, self.plugins = self.schedule.plan, self.schedule.plugins
        self.threads = facts.threads()
        self.checkup = checkups.latest(self.options.cache)
        self.records = [Record(heading=Heading(rounds=self.schedule.rounds))]

    def slot(self, case: Case, kind: Kind, **which: int) -> Slot:
        """Name the place of a record: what of a case it measures, and which round, block or repeat."""
        return Slot(case=self.schedule.digest(case), kind=kind, **which)

    def known(self, case: Case, kind: Kind) -> Summary | None:
        """Return what is known of a case: of its memory, its prediction or its pilot."""
        return self.latest.get(self.slot(case, kind))

    def is_open(self, slot: Slot) -> bool:
        """Check whether a slot wants a result, and was not tried in vain by this run as often as it may."""
        record = self.latest.get(slot)
        tried = record is not None and record.attempt >= ATTEMPTS and record.run_id == self.run_id
        return self.schedule.wants(slot, record) and not tried

    def peak(self, case: Case) -> int | None:
        """Return the measured peak of a case in bytes."""
        known = self.known(case, "memory")
        return None if known is None or known.status != "ok" else known.peak_bytes

    def work(
        self,
        kind: Kind,
        cases: Sequence[Case],
        deadline: float | None = None,
        watch: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Return what a worker showed of each case; it has `deadline` seconds for each, or those of its kind."""
        allowed = deadline or self.schedule.allowed(kind)
        return runner.run(self.task(kind, cases, **settings), self.threads, allowed, watch or self.progress.phase)

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
                "probe": self.schedule.probe_digest(case) if slot.kind == "memory" else None,
                "memory": record.memory.model_copy(update={"batches_digest": digest}) if digest else record.memory,
                "notes": {**record.notes, **self.notes(case)},
            }
        )
        self.write(complete)
        self.records.append(complete)
        self.latest[slot] = Summary.of(complete)
        self.progress.finish(complete, case)

    def notes(self, case: Case) -> dict[str, str]:
        """Return what a reader would not guess: that a corpus has fewer tokens than the model has rows."""
        corpus = self.corpora.get(case.comparison_key)
        rows = case.shape.get("vocabulary")
        if not isinstance(corpus, TokenFile) or not isinstance(rows, int) or corpus.vocabulary >= rows:
            return {}
        return {"vocabulary": f"the corpus gives {corpus.vocabulary} distinct tokens, the model has {rows} rows"}


def origin(schedule: Schedule, run_id: str) -> Origin:
    """Return what all records of a run share."""
    return origin_of(schedule.plan, schedule.plugins, run_id).model_copy(update={"plan": schedule.plan_digest})


def origin_of(plan: Plan, plugins: Plugins, run_id: str = "") -> Origin:
    """Return where records of a plan are from that no run is resumed by."""
    return Origin(
        run_id=run_id,
        suite=plan.name,
        utc=now(),
        machine=facts.facts(),
        versions=facts.versions() | dict(plugins.versions),
        commit=facts.commit(),
    )


def new_id(latest: Latest | None = None) -> str:
    """Name a run: when it began, in which process, and by chance.

    It is later than the runs that `latest` is from, even where the clock was set back.
    """
    began = datetime.now(UTC).replace(microsecond=0)
    for run_id in {known.run_id for known in (latest or {}).values()}:
        with suppress(ValueError):
            before = datetime.strptime(run_id.split("-")[0], store.STAMP).replace(tzinfo=UTC)
            began = max(began, before + timedelta(seconds=1))
    return f"{began:{store.STAMP}}-{os.getpid()}-{secrets.token_hex(3)}"


def now() -> str:
    """Return the time in UTC, to the second, as ISO 8601 writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _joined(digests: tuple[str, ...]) -> str | None:
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else None
