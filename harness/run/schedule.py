"""What a run consists of: every slot of a plan in order, what identifies it, and which ones still want a result."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from harness import backends
from harness.contract.assembly import probe_of
from harness.contract.plugins import Plugins
from harness.machine import facts
from harness.records import Case, Record, Slot
from harness.records.record import OPEN_STATUSES
from harness.suite.plan import Group, Plan

REPEATS_FROM_ROUNDS = 6
"""From this many time rounds on, memory is measured three times and its largest peak taken."""

REFUSED = ("unsupported", "skipped_guard")
"""Statuses by which a machine says that it does not run a case."""


class Known(NamedTuple):
    """What a run must remember of a record that it has written: a night of them would fill the memory."""

    status: str
    attempt: int = 1
    run_id: str = ""
    need_bytes: int = 0
    step_seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, record: Record) -> "Known":
        """Keep the bytes that were predicted, and the steps of a pilot."""
        need = max(record.floor_bytes or 0, record.predicted_peak_bytes or 0)
        steps = record.step_seconds if record.slot is not None and record.slot.kind == "pilot" else ()
        return cls(record.status, record.attempt, record.run_id, need, steps)


Latest = Mapping[Slot, Known]


@dataclass(frozen=True)
class Schedule:
    """The slots of a plan; `rounds` are the time rounds, which the command line may change.

    Where it runs `elsewhere`, the machines that get its groups say what they lack, and what they said is a result.
    """

    plan: Plan
    plugins: Plugins
    rounds: int
    all_rounds: bool = False
    elsewhere: bool = False

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of all code that decides a figure."""
        return facts.versions() | dict(self.plugins.versions)

    def digest(self, case: Case) -> str:
        """Identify a case together with the code that runs it."""
        return case.digest(facts.commit(), json.dumps(self.versions, sort_keys=True))

    @cached_property
    def plan_digest(self) -> str:
        """Identify the whole run, so that only the same one is resumed: elsewhere, or here."""
        text = "".join(map(str, self.slots())) + "elsewhere" * self.elsewhere
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def positions(self) -> dict[str, int]:
        """The row of each case in the tables, by its digest."""
        return {self.digest(case): index for index, case in enumerate(self.plan.cases)}

    @cached_property
    def _baselines(self) -> dict[str, str]:
        groups = self.plan.groups
        return {self.digest(case): self.digest(group.baseline) for group in groups for case in group.cases}

    @property
    def repeats(self) -> int:
        """How often the memory of a case is measured."""
        return 3 if self.rounds >= REPEATS_FROM_ROUNDS else 1

    def slots(self) -> Iterator[Slot]:
        """List every slot of the plan, in the order of the run."""
        for case in self.plan.cases:
            yield Slot(case=self.digest(case), kind="predict")
        for group in self.plan.groups:
            yield from self.measured(group)

    def measured(self, group: Group) -> Iterator[Slot]:
        """List the slots of a group, but for its predictions."""
        if self.obstacle(group.baseline) is not None:
            for case in group.cases:
                yield Slot(case=self.digest(case), kind="memory")
            return
        for case in group.cases:
            yield Slot(case=self.digest(probe_of(self.plugins, case)), kind="numerics")
            for repeat in range(self.repeats):
                yield Slot(case=self.digest(case), kind="memory", repeat=repeat)
        for number in range(self.rounds):
            for case in group.cases:
                yield Slot(case=self.digest(case), kind="time", round=number)

    def obstacle(self, case: Case) -> str | None:
        """Say why a case cannot run here; None where it is another machine that says so."""
        return None if self.elsewhere else obstacle(self.plugins, case)

    def is_due(self, slot: Slot, latest: Latest) -> bool:
        """Say whether a slot still wants a result: what was not measured for memory is not timed."""
        if slot.kind == "time" and (
            self._cannot_run(slot.case, latest)
            or (slot.round and not self.all_rounds and self._cannot_run(self._baselines[slot.case], latest))
        ):
            return False
        return not self._is_done(latest.get(slot))

    def _cannot_run(self, case: str, latest: Latest) -> bool:
        memory = latest.get(Slot(case=case, kind="memory"))
        return memory is not None and self._is_done(memory) and memory.status != "ok"

    def _is_done(self, record: Known | None) -> bool:
        return is_done(record) or (self.elsewhere and record is not None and record.status in REFUSED)


def obstacle(plugins: Plugins, case: Case) -> str | None:
    """Say why a case cannot run on this machine: no such place, or a strategy without anything for it."""
    place = case.place
    absent = backends.absent(place.backend, place.device, case.ranks)
    if absent is not None:
        return absent
    workload = plugins.workloads[case.workload]
    told = (plugins.strategies[applied.name].obstacle(place, workload) for applied in case.strategies)
    return next((reason for reason in told if reason), None)


def is_done(record: Known | None) -> bool:
    """Say whether a record is a result, not something that a later run tries again."""
    return record is not None and record.status not in OPEN_STATUSES
