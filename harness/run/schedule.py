"""What a run consists of: every slot of a plan in order, what identifies it, and which ones still want a result."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from harness import backends
from harness.contract.assembly import probe_of
from harness.contract.parts import ENDING_PARTS
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.contract.strategy import Strategy
from harness.machine import facts, gpu
from harness.records import Case, Kind, Record, Slot
from harness.records.record import OPEN_STATUSES
from harness.records.roofline import Operations
from harness.run import digests, locks
from harness.suite.plan import Comparison, Plan
from harness.verdicts import claims, rounds
from harness.verdicts.expressions import WAITS, plain_label
from harness.verdicts.observed import possible, step_time
from harness.verdicts.pooled import BASELINES

REFUSED = ("unsupported", "skipped_guard")
"""Statuses by which a machine says that it does not run a case."""
IN_16_BITS = ("bfloat16", "float16")
PREDICTING_SECONDS = 300.0
"""What the prediction of a case may take, at most."""
REFERENCE_SECONDS = 300.0
"""What the reference of an answer may take, at least."""


class Summary(NamedTuple):
    """What a run must remember of a record that it has written: a night of them would fill the memory.

    `step_seconds` are the steps of a pilot, `seconds` the step time of a time measurement, `timed_seconds` all its
    steps, `worker_seconds` the life of its process, however that ended; `need_bytes` is what it takes at most,
    `peak_bytes` what was measured of a rank, `children_bytes` what its child processes took, `work_in_16_bits`
    that of a step, as it is predicted.
    """

    status: str
    attempt: int = 1
    run_id: str = ""
    need_bytes: int = 0
    step_seconds: tuple[float, ...] = ()
    seconds: float | None = None
    worker_seconds: float = 0.0
    peak_bytes: int | None = None
    timed_seconds: float = 0.0
    children_bytes: int = 0
    work_in_16_bits: tuple[Operations, ...] = ()

    @classmethod
    def of(cls, record: Record) -> "Summary":
        """Keep what later tasks of the run need."""
        steps, kind = record.times.step_seconds, record.slot.kind if record.slot is not None else ""
        return cls(
            record.status,
            record.origin.attempt,
            record.origin.run_id,
            record.prediction.need_bytes or 0,
            steps if kind == "pilot" and all(map(possible, steps)) else (),
            step_time(record) if kind == "time" else None,
            worker_seconds(record),
            record.peak_bytes,
            sum(steps) if kind == "time" else 0.0,
            record.child_peak_bound_bytes or 0,
            tuple(each for each in record.prediction.predicted_work if each.dtype in IN_16_BITS),
        )


Latest = Mapping[Slot, Summary]


@dataclass(frozen=True)
class Schedule:
    """The slots of a plan; `rounds` are the time rounds, which the command line may change.

    Where it runs `elsewhere`, the machines that get its comparisons say what they lack, and what they said is a result.
    `known` is what an earlier run identified its cases by, by the digest of the case alone.
    """

    plan: Plan
    plugins: Plugins
    rounds: int
    all_rounds: bool = False
    elsewhere: bool = False
    known: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of all code that decides a figure."""
        return facts.versions() | dict(self.plugins.versions)

    @cached_property
    def code(self) -> str:
        """The digest of the code that decides figures: a commit moves with other files too, and dirty trees differ."""
        return digests.of_code(self.plugins)

    def digest(self, case: Case) -> str:
        """Return what identifies a case together with the code that runs it."""
        return self._digests.get(id(case)) or self._digest(case)

    def probe_digest(self, case: Case) -> str:
        """Return what identifies the case in which the answer of another is compared."""
        return self._probes.get(id(case)) or self._digest(probe_of(self.plugins, case))

    @cached_property
    def _digests(self) -> dict[int, str]:
        """The digest of each case of the plan, by its identity: slots are asked for again after each comparison."""
        return {id(case): self._digest(case) for case in self.plan.cases}

    @cached_property
    def _probes(self) -> dict[int, str]:
        measured = (each for each in self.plan.comparisons if self.obstacle(each.baseline) is None)
        return {id(case): self._digest(probe_of(self.plugins, case)) for each in measured for case in each.cases}

    def _digest(self, case: Case) -> str:
        known = self.known.get(case.digest()) if self.known else None
        return known or case.digest(self.code, json.dumps(self.versions, sort_keys=True))

    @cached_property
    def plan_digest(self) -> str:
        """Return what identifies the whole run, so that only the same one is resumed: elsewhere, or here.

        Beside the slots these are the settings of the suite, the files of the corpora, the threads and the GPUs.
        """
        suite, root = self.plan.suite, self.plan.path.resolve().parent
        rows = (digests.of_corpus(name, root) for name in sorted({case.corpus for case in self.plan.cases}))
        settings = (suite.memory_steps, suite.steps, suite.warmup)
        known = (settings, list(rows), [] if self.elsewhere else self.devices)
        text = "".join(map(str, self.slots())) + "elsewhere" * self.elsewhere + json.dumps(known)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def devices(self) -> list[object]:
        """What a figure depends on of this machine that may be another after a stop: the threads, and which GPUs."""
        gpus = locks.gpus(self.plan.places)
        card = gpu.detect() if gpus else None
        return [facts.threads(), gpus, card.name if card is not None else ""]

    @cached_property
    def positions(self) -> dict[str, int]:
        """The row of each case in the tables, by its digest."""
        return {self.digest(case): index for index, case in enumerate(self.plan.cases)}

    def staying(self, comparison: Comparison) -> set[str]:
        """Return the rows that are timed until the suite's minutes are spent: a claim rests on what they wait for."""
        waits = claims.asked(self.plan.suite.claims, comparison.baseline, WAITS)
        claimed = {case.label for case in comparison.cases if names(case) & waits}
        return claimed | set(BASELINES) if claimed else set()

    def slots(self) -> Iterator[Slot]:
        """Yield every slot of the plan, in the order of the run."""
        for case in self.plan.cases:
            yield Slot(case=self.digest(case), kind="predict")
        for comparison in self.plan.comparisons:
            yield from self.measured(comparison)

    def measured(self, comparison: Comparison) -> Iterator[Slot]:
        """Yield the slots of a comparison, but for its predictions."""
        if self.obstacle(comparison.baseline) is not None:
            for case in comparison.cases:
                yield Slot(case=self.digest(case), kind="memory")
            return
        for case in comparison.cases:
            yield Slot(case=self.probe_digest(case), kind="numerics")
            yield Slot(case=self.digest(case), kind="memory")
        for number in range(self.rounds):
            for case in comparison.cases:
                yield Slot(case=self.digest(case), kind="time", round=number)

    def obstacle(self, case: Case) -> str | None:
        """Return why a case cannot run here; None where it is another machine that says so."""
        return None if self.elsewhere else obstacle(self.plugins, case)

    @cached_property
    def obstructed(self) -> frozenset[str]:
        """The digests of the cases that cannot run here, and of those in which their answers would be compared."""
        cases: set[str] = set()
        for comparison in self.plan.comparisons:
            if self.obstacle(comparison.baseline) is not None:
                cases |= set(map(self.digest, comparison.cases))
                continue
            for case in comparison.cases:
                if self.obstacle(case) is not None:
                    cases |= {self.digest(case), self.probe_digest(case)}
        return frozenset(cases)

    @property
    def places(self) -> dict[str, Place]:
        """The place of each case, by its digest, and by that of the case in which its answer is compared."""
        cases = {self.digest(case): case.place for case in self.plan.cases}
        measured = [each for each in self.plan.comparisons if self.obstacle(each.baseline) is None]
        return cases | {self.probe_digest(case): case.place for each in measured for case in each.cases}

    def allowed(self, kind: Kind) -> float:
        """Return how many seconds a task of a kind may take."""
        seconds = self.plan.suite.timeout_seconds
        if kind == "predict":
            return min(PREDICTING_SECONDS, seconds)
        return max(REFERENCE_SECONDS, seconds) if kind == "reference" else seconds

    def wants(self, slot: Slot, known: Summary | None) -> bool:
        """Check whether a slot wants a result; that a case cannot run is one as long as it cannot."""
        stands = known is not None and known.status == "unsupported" and slot.case in self.obstructed
        return not (stands or self._is_done(slot.kind, known))

    def there(self, latest: Latest) -> int:
        """Return how many results of the plan are there; blocks of a round count once."""
        known = {slot.model_copy(update={"block": 0}) for slot in latest}
        return len((known & set(self.slots())).difference(self.due(latest)))

    def due(self, latest: Latest) -> list[Slot]:
        """Return the slots that still want a result, in the order of the run; time rounds at most that many."""
        predictions = (Slot(case=self.digest(case), kind="predict") for case in self.plan.cases)
        open_ = [slot for slot in dict.fromkeys(predictions) if self.wants(slot, latest.get(slot))]
        timed = by_case(latest)
        return [
            *open_,
            *(slot for comparison in self.plan.comparisons for slot in self.due_of(comparison, latest, timed)),
        ]

    def tasks(self, latest: Latest) -> list[Slot]:
        """Return what is left to do, as far as it is known: the slots that are due, and the pilots of their rounds."""
        due = self.due(latest)
        if self.plan.suite.steps is not None and self.plan.suite.warmup is not None:
            return due
        pilots = dict.fromkeys(Slot(case=slot.case, kind="pilot") for slot in due if slot.kind == "time")
        return [*due, *(slot for slot in pilots if self.wants(slot, latest.get(slot)))]

    def due_of(self, comparison: Comparison, latest: Latest, timed: "Timed | None" = None) -> Iterator[Slot]:
        """Yield the slots of a comparison that still want a result, but for its predictions."""
        for slot in dict.fromkeys(self.measured(comparison)):
            if slot.kind != "time" and self.wants(slot, latest.get(slot)):
                yield slot
        if self.obstacle(comparison.baseline) is None:
            number, members = self.turn(comparison, latest, by_case(latest) if timed is None else timed)
            for later in range(number, self.rounds_of(comparison, latest)):
                yield from (Slot(case=self.digest(case), kind="time", round=later) for case in members)

    def turn(
        self, comparison: Comparison, latest: Latest, timed: "Timed", given_up: Collection[int] = ()
    ) -> tuple[int, list[Case]]:
        """Return the time round that comes next in a comparison, and its members: none when its times are decided.

        Cases whose memory was not measured are not timed, since they did not run; before it was measured all are. In
        rounds that are `given_up` a member without a time has failed, however it ended.
        """
        cases = [case for case in comparison.cases if not self.cannot_run(self.digest(case), latest)]
        every = {case.label: timed.get(self.digest(case), {}) for case in cases}
        runs = {label: {at: known.run_id for at, known in processes.items()} for label, processes in every.items()}
        latest_of = rounds.newest(every, runs)
        times = {
            label: {at: known.seconds for at, known in processes.items() if known.seconds is not None}
            for label, processes in latest_of.items()
        }
        planned = self.rounds_of(comparison, latest)
        left = rounds.left(latest_of, planned)
        failed = {
            label: left.get(label, set())
            | {
                at[0]
                for at, known in processes.items()
                if known.seconds is None and (self._is_done("time", known) or at[0] in given_up)
            }
            for label, processes in latest_of.items()
        }
        number, members = rounds.next_turn(list(every), times, failed, planned, self.staying(comparison))
        if self.seconds_left(cases, timed) < 0:
            return number, []
        return number, [case for case in cases if case.label in members]

    def seconds_left(self, cases: Iterable[Case], timed: "Timed") -> float:
        """Return how long the rounds of a comparison may still take, of which these cases were timed, in seconds.

        A process that was out of time, and has more now, is run again: what it took counts no more.
        """
        processes = (known for case in cases for known in timed.get(self.digest(case), {}).values())
        spent = (each.worker_seconds for each in processes if each.status != "timeout" or self._is_done("time", each))
        return 60 * self.plan.suite.timing_minutes - sum(spent)

    def rounds_of(self, comparison: Comparison, latest: Latest) -> int:
        """Return the time rounds of a comparison: one where the baseline does not run, since no ratio can be formed.

        Unless all are asked for, to compare the rows with each other.
        """
        compared = self.all_rounds or not self.cannot_run(self.digest(comparison.baseline), latest)
        return self.rounds if compared else min(1, self.rounds)

    def cannot_run(self, case: str, latest: Latest) -> bool:
        """Check whether the memory of a case, given by its digest, was to be measured and was not."""
        memory = latest.get(Slot(case=case, kind="memory"))
        return memory is not None and memory.status != "ok"

    def _is_done(self, kind: Kind, known: Summary | None) -> bool:
        """Check whether what is known is a result, not something that a later run tries again.

        A timeout is one of those, once the suite allows more than the process had.
        """
        if known is None:
            return False
        if known.status == "timeout" and known.worker_seconds:
            return known.worker_seconds >= self.allowed(kind)
        return known.status not in OPEN_STATUSES or (self.elsewhere and known.status in REFUSED)


def names(case: Case) -> set[str]:
    """Return how an expression may name the row of a case."""
    return {plain_label(case.strategies_label), plain_label("+".join(applied.name for applied in case.strategies))}


def obstacle(plugins: Plugins, case: Case) -> str | None:
    """Return why a case cannot run on this machine: no such place, or strategies that do not go there or together."""
    place = case.place
    absent = backends.absent(place.backend, place.device, case.ranks)
    return absent if absent is not None else misfit(plugins, case)


def misfit(plugins: Plugins, case: Case) -> str | None:
    """Return why the strategies of a case do not go to its place or together, whatever machine it is on."""
    workload = plugins.workloads[case.workload]
    strategies = [plugins.strategies[applied.name] for applied in case.strategies]
    reasons = (strategy.obstacle(case.place, workload) or _idle(strategy, case) for strategy in strategies)
    return next((reason for reason in reasons if reason), None) or conflict(strategies)


def _idle(strategy: Strategy, case: Case) -> str | None:
    """Return why a strategy has nothing to do: it rewrites what follows the steps, and a run ends with them."""
    if strategy.rewrites and set(strategy.rewrites) <= set(ENDING_PARTS) and case.shape.get("evaluations") == 0:
        return f"'{strategy.name}' is for what follows the steps: give `evaluations` in the shape, or --evaluations"
    return None


def conflict(strategies: Sequence[Strategy]) -> str | None:
    """Return in one sentence why strategies, in the order in which they are applied, do not go together."""
    for at, one in enumerate(strategies):
        for place, other in enumerate(strategies):
            if (reason := one.conflicts.get(other.name)) is not None:
                return f"'{one.name}' does not go together with '{other.name}': {reason}"
            if at < place and (reason := one.conflicts.get(f"before {other.name}")) is not None:
                return f"'{one.name}' does not go before '{other.name}': {reason}"
    return None


Timed = Mapping[str, Mapping[tuple[int, int], Summary]]
"""By case what is known of its time measurements, by round and block."""


def by_case(latest: Latest) -> Timed:
    """Return what is known of the time measurements of each case."""
    timed: dict[str, dict[tuple[int, int], Summary]] = {}
    for slot, known in latest.items():
        if slot.kind == "time":
            timed.setdefault(slot.case, {})[slot.round, slot.block] = known
    return timed


def worker_seconds(record: Record) -> float:
    """Return how long the process of a record lived, in seconds; one that ended badly could not say so itself."""
    seconds = record.origin.worker_seconds
    if seconds is None:
        seconds = record.evidence.get("seconds")
    return seconds if isinstance(seconds, int | float) else 0.0
