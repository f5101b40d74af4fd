"""Time a comparison round by round: whose processes take turns, in which blocks, and how long each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from harness import backends
from harness.machine import facts, interference
from harness.records import Case, Record, Slot
from harness.run import turns
from harness.run.bench import ATTEMPTS, Bench
from harness.run.pacing import UNKNOWN, Pacing, pace
from harness.run.schedule import by_case
from harness.suite.plan import Comparison
from harness.suite.schema import Suite
from harness.verdicts import blocks
from harness.verdicts.pooled import BASELINES

HOPELESS = 4
"""Processes timed alone that were disturbed, run again and disturbed again, after which a run times none twice."""
OF_A_PROCESS = 256 << 20
"""What a process takes beside its peak, in bytes: interpreter and frameworks."""


@dataclass
class Rounds:
    """The timed processes of a run."""

    bench: Bench
    disturbed_twice: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.schedule, self.latest = self.bench.schedule, self.bench.latest

    @property
    def suite(self) -> Suite:
        return self.bench.plan.suite

    def time(self, comparison: Comparison) -> None:
        """Time a comparison round by round, until all its rows are decided or the suite's time is spent.

        A round in which a member is killed whenever it is timed is left without that member.
        """
        tried: Counter[int] = Counter()
        cuts: dict[int, list[list[str]]] = {}
        while True:
            given_up = {number for number, times in tried.items() if times == ATTEMPTS}
            number, members = self.schedule.turn(comparison, self.latest, by_case(self.latest), given_up)
            members = [case for case in members if self.measured(case)]
            if not members or number in given_up:
                return
            tried[number] += 1
            cases, timed = (set(map(self.schedule.digest, each)) for each in (comparison.cases, members))
            self.bench.progress.timed(cases, number, timed)
            self.time_round(comparison, number, members, cuts)

    def time_round(
        self, comparison: Comparison, number: int, members: list[Case], cuts: dict[int, list[list[str]]]
    ) -> None:
        """Time every member once, in random order, in blocks of neighbours in time with the baseline in each.

        A round that is timed again has the same blocks as before, which `cuts` keeps: so nothing is left of the first
        try, whose neighbours are others.
        """
        by_label = {case.label: case for case in members}
        for case in members:
            self.pacing(case)  # pilots come first: what they show cuts the blocks
        free = facts.free_to_use()
        rooms = {case.label: self.room(case) for case in members if self.takes_turns(case)}
        turning = {label: room for label, room in rooms.items() if room + _neighbours(rooms, label) <= free}
        if not turning.keys() >= rooms.keys() & set(BASELINES):  # both are what rows are compared with: timed alike
            turning = {label: room for label, room in turning.items() if label not in BASELINES}
        if number not in cuts:
            cuts[number] = blocks.blocks(
                list(by_label),
                {label: seconds for label, case in by_label.items() if (seconds := self.share_of_block(case))},
                f"{self.suite.seed}/{comparison.baseline.comparison_key}",
                number,
                sizes=turning,
                room=free,
            )
        for block, labels in enumerate(cuts[number]):
            slots = {label: self.bench.slot(by_label[label], "time", round=number, block=block) for label in labels}
            together = [label for label in labels if label in turning]
            while sum(turning[label] for label in together) > free:
                together.remove(max(together, key=lambda label: (label not in BASELINES, turning[label])))
            if len(together) > 1:  # what disturbs them meets all of them alike
                self.time_together([(by_label[label], slots[label]) for label in together])
            for label in labels if len(together) < 2 else [label for label in labels if label not in together]:
                self.time_alone(by_label[label], slots[label])

    def time_alone(self, case: Case, slot: Slot) -> None:
        """Time one process, and once more where something disturbed it.

        The second counts, and is written last, unless it failed where the first ran.
        """
        records, disturbed = self.timed([(case, slot)])
        if disturbed and self.disturbed_twice < HOPELESS:
            again, disturbed = self.timed([(case, slot)])
            self.disturbed_twice += disturbed
            records = sorted([*records, *again], key=lambda record: record.status == "ok")
        for record in records:
            self.bench.keep(record, case, slot)

    def time_together(self, timed: Sequence[tuple[Case, Slot]]) -> None:
        """Time processes in turns, and write what they showed."""
        for (case, slot), record in zip(timed, self.timed(timed)[0], strict=True):
            self.bench.keep(record, case, slot)

    def takes_turns(self, case: Case) -> bool:
        """Check whether a case is one process on the CPU that can be stopped, and needs no machine to itself."""
        alone = any(self.bench.plugins.strategies[each.name].is_alone(each.knobs) for each in case.strategies)
        return case.place.device == "cpu" and backends.processes(case.place.backend, case.ranks) == 1 and not alone

    def room(self, case: Case) -> int:
        """Return about how much memory a timed process of a case takes in bytes, its ranks and children with it."""
        known = self.bench.known(case, "memory")
        children = known.children_bytes if known is not None else 0
        return OF_A_PROCESS + (self.bench.peak(case) or 0) * case.ranks + children

    def timed(self, timed: Sequence[tuple[Case, Slot]]) -> tuple[list[Record], bool]:
        """Time processes in turns; return their records, and whether something disturbed them."""
        pacings = [self.pacing(case) for case, _ in timed]
        seed = f"{self.suite.seed}/{timed[0][0].comparison_key}/{timed[0][1].round}/{timed[0][1].block}"
        tasks = [
            self.bench.task(
                "time", [case], steps=pacing.steps, warmup=pacing.warmup, turns=turns.TURNS if len(timed) > 1 else 1
            )
            for (case, _), pacing in zip(timed, pacings, strict=True)
        ]

        def starting(number: int) -> None:
            case, slot = timed[number]
            self.bench.progress.start(f"time {slot.round + 1}/{self.schedule.rounds}", case)

        before = interference.snapshot(timed[0][0].place)
        allowed = self.suite.timeout_seconds
        records = turns.run(tasks, self.bench.threads, allowed, self.bench.progress.phase, Random(seed), starting)
        disturbances = interference.disturbances(before, interference.snapshot(timed[0][0].place))
        flagged = [
            record.model_copy(update={"flags": (*record.flags, *pacing.flags, *disturbances)})
            for record, pacing in zip(records, pacings, strict=True)
        ]
        return flagged, bool(disturbances)

    def share_of_block(self, case: Case) -> float:
        """Return how long a process of a case keeps others waiting, as far as is known, in seconds.

        Where it takes turns these are its timed steps, since all others of the block have started before; else it is
        its life.
        """
        digest = self.schedule.digest(case)
        timed = [known for known in by_case(self.latest).get(digest, {}).values() if known.seconds is not None]
        memory = self.bench.known(case, "memory")
        pilot = self.bench.known(case, "pilot")
        turning = self.takes_turns(case)
        if timed:
            return median(known.timed_seconds if turning else known.worker_seconds for known in timed)
        if turning and pilot is not None and pilot.step_seconds:
            return median(pilot.step_seconds) * self.pacing(case).steps
        return memory.worker_seconds if memory is not None else 0.0

    def measured(self, case: Case) -> bool:
        """Check whether the memory of a case was measured, so that it is worth timing."""
        record = self.bench.known(case, "memory")
        return record is not None and record.status == "ok"

    def pacing(self, case: Case) -> Pacing:
        """Take warm-up and steps from the suite, or find them once by a pilot and freeze them."""
        warmup, steps = self.suite.warmup, self.suite.steps
        if steps is not None and warmup is not None:
            return Pacing(warmup, steps)
        slot = self.bench.slot(case, "pilot")
        if self.bench.is_open(slot):
            self.bench.progress.start("pilot", case)
            self.bench.keep(self.bench.work("pilot", [case])[0], case, slot)
        turns_of = turns.TURNS if self.takes_turns(case) else 1
        paced = pace(pilot, turns_of) if (pilot := self.latest[slot].step_seconds) else UNKNOWN
        return Pacing(paced.warmup if warmup is None else warmup, steps or paced.steps, paced.flags)


def _neighbours(rooms: Mapping[str, int], label: str) -> int:
    """Return the memory in bytes of the least that a process takes turns with: the baseline and the smallest others."""
    others = sorted((other not in BASELINES[:1], room) for other, room in rooms.items() if other != label)
    return sum(room for _, room in others[: blocks.LEAST - 1])
