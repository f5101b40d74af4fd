"""What a worker of a cluster does: measure one comparison on its machine, and send each record as it comes.

It is the session that runs without a cluster, for a plan of one comparison. Records travel as JSON in events of Dask.
"""

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.contract import plugins
from harness.contract.plugins import Plugins
from harness.machine import facts, orphans
from harness.machine.environment import cache_folder
from harness.records import Case, Record, Slot, store
from harness.refusal import Refusal
from harness.run import digests, locks, prepare_data, session, temporary
from harness.run.bench import Options, Progress
from harness.run.schedule import Latest, Summary, obstacle
from harness.suite.plan import Plan

TOPIC = "harness"
"""The topic of Dask's events that workers send: one for all runs, since a scheduler forgets no topic."""


class ClusterError(Refusal):
    """A cluster that cannot be used, in one sentence."""


@dataclass(frozen=True)
class Code:
    """What decides a figure besides the machine, and so must be the same everywhere."""

    versions: dict[str, str]
    commit: str
    digest: str

    @classmethod
    def here(cls, loaded: Plugins) -> "Code":
        return cls(facts.versions() | dict(loaded.versions), facts.commit(), digests.of_code(loaded))

    def refuse_other(self, other: "Code", where: str) -> None:
        """Raise ClusterError unless the code of another machine is this."""
        here, there = ({**code.versions, "commit": code.commit, "digest": code.digest} for code in (self, other))
        for name in sorted(here | there):
            if here.get(name) != there.get(name):
                difference = f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
                raise ClusterError(f"{where} has other code ({difference}): install the same versions on both")


@dataclass(frozen=True)
class Order:
    """What a worker is to do: measure a plan of one comparison, as part of a run.

    Unless the comparison is to be measured `whole`, answers that the run has from the same machine are left out.
    """

    plan: Plan
    options: Options
    code: Code
    run_id: str
    number: int
    whole: bool


class _Cancelled(Exception):
    """Nobody waits for this comparison any more."""


class _Sender(Progress):
    """Send what happens to the process that ordered it, and stop when that no longer waits."""

    def __init__(self, order: Order) -> None:
        from distributed import get_worker

        self.order, self.worker, self.token, self.sent = order, get_worker(), secrets.token_hex(8), 0
        self.key = self.worker.get_current_task()

    def send(self, **message: Any) -> None:
        address = {"run": self.order.run_id, "comparison": self.order.number, "attempt": self.token}
        self.worker.log_event(TOPIC, address | message)

    def check(self) -> None:
        """Raise where the task was cancelled, or its client or this worker is going."""
        task = self.worker.state.tasks.get(self.key)
        going = self.worker.status.name in ("closing", "closed", "failed")
        if going or task is None or task.state == "cancelled":
            raise _Cancelled

    def phase(self, name: str) -> None:
        self.check()

    def start(self, task: str, case: Case) -> None:
        self.check()
        self.send(started=task, case=case.model_dump_json())

    def warn(self, sentence: str) -> None:
        self.send(warning=sentence)

    def write(self, record: Record) -> None:
        self.sent += 1
        self.send(record=store.encoded(record).decode())


class _Answers:
    """The answers that the last run found on this machine, in its cache: comparisons often share them."""

    def __init__(self, cache: Path, run_id: str) -> None:
        self.path, self.run_id = cache / f"answers-{facts.name()}.json", run_id

    def read(self) -> dict[Slot, Summary]:
        try:
            runs = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        cases = runs.get(self.run_id, {}) if isinstance(runs, dict) else {}
        return {Slot(case=case, kind="numerics"): Summary(status, 1, self.run_id) for case, status in cases.items()}

    def write(self, latest: Latest) -> None:
        cases = {slot.case: known.status for slot, known in latest.items() if slot.kind == "numerics"}
        with suppress(OSError):  # the next comparison asks again
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({self.run_id: cases}), encoding="utf-8")


def describe(names: tuple[str, ...]) -> tuple[str, Code]:
    """Return the name of this machine, and what code it has."""
    return facts.name(), Code.here(plugins.load(names))


def measure(order: Order) -> int:
    """Run a comparison on this machine as soon as nothing else is measured here; return how many records were sent."""
    sender = _Sender(order)
    loaded = plugins.load(order.options.plugins)
    order.code.refuse_other(Code.here(loaded), f"the worker on {facts.name()}")
    options = replace(order.options, cache=cache_folder())
    places = [comparison.baseline.place for comparison in order.plan.comparisons]
    with locks.in_turn(places, sender.check), temporary.folder("harness-reference-") as reference:
        orphans.sweep()
        sender.send(begun=facts.name())
        plan, corpora = prepare_data.prepare(
            order.plan, loaded, options.cache, lambda case: obstacle(loaded, case) is None
        )
        answers = _Answers(options.cache, order.run_id)
        latest = {} if order.whole else answers.read()
        schedule = session.schedule_of(plan, loaded, options)
        session.Session(
            schedule,
            options,
            progress=sender,
            run_id=order.run_id,
            reference=reference,
            corpora=corpora,
            latest=latest,
            write=sender.write,
        ).measure()
        answers.write(latest)
    return sender.sent
