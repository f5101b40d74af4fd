"""Run a plan on the workers of a Dask cluster: each comparison whole on one machine, each record sent here as it comes.

A task of Dask is a comparison (`cluster_worker`), and this process alone writes records. Where a worker is lost, Dask
gives its comparison to another, which begins anew: with its first message all that the lost attempt measured is
withdrawn, and later messages of that are ignored. So no comparison has figures of two machines.
"""

import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from harness.contract import plugins
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import facts, gpu
from harness.records import Case, Record, Slot, store
from harness.run import bench, locks, prepare_data, session, temporary
from harness.run.bench import Options, Progress
from harness.run.cluster_worker import TOPIC, ClusterError, Code, Order, describe, measure
from harness.run.schedule import Latest, Schedule, Summary
from harness.suite.plan import Comparison, Plan

GPU = "gpu"
"""The resource that a worker must offer to get comparisons of a place on a GPU."""
LOSSES = 2
"""How often a comparison may lose its worker, and yet be tried again."""
PATIENCE_SECONDS = 5.0
"""How long to wait for an answer, or for a first worker."""
DESERTED_SECONDS = 60.0
"""How long to wait while there is no worker at all."""


def run(address: str, plan: Plan, loaded: Plugins, options: Options, progress: Progress) -> Path:
    """Run everything of a plan that has no result yet on a cluster; return the results file.

    Raises what `session.run` raises, and ClusterError for a cluster that cannot be used, before anything is measured.
    KeyboardInterrupt leaves the records that came, and ends the tasks.
    """
    folder = options.results / plan.name / facts.name()
    with locks.measuring(folder, ()):
        session.refuse_claims(plan)
        plan = prepare_data.closed(plan, loaded, options.cache)
        progress.plan(plan)
        plan = replace(plan, path=plan.path.resolve())
        options = replace(options, plugins=tuple(map(_absolute, options.plugins)))
        schedule = session.schedule_of(plan, loaded, options, elsewhere=True)
        with connected(address) as client:
            _refuse(address, client, schedule, options.plugins)
            path, latest, _ = session.opened(
                folder, schedule, options, lambda latest, records: not all(finished(schedule, latest))
            )
            run_id = bench.new_id(latest)
            store.append(path, session.beginning(schedule, run_id))
            FanOut(address, client, schedule, options, progress, run_id, path, latest).run()
        return path


def _absolute(name: str) -> str:
    return os.path.abspath(name) if name.endswith(".py") else name


def finished(schedule: Schedule, latest: Latest) -> Iterator[bool]:
    """Yield for each comparison whether every case has its result; that it cannot run, or would not fit, is one."""
    for comparison in schedule.plan.comparisons:
        known = latest.get(Slot(case=schedule.digest(comparison.baseline), kind="memory"))
        if known is not None and known.status == "unsupported":  # one of each case says so
            yield all(slot in latest for slot in wanted(schedule, comparison, latest))
        else:
            yield not any(True for _ in schedule.due_of(comparison, latest))


def wanted(schedule: Schedule, comparison: Comparison, latest: Latest) -> list[Slot]:
    """Return the slots of a comparison: where its baseline cannot run, one of each case says so."""
    memory = [Slot(case=schedule.digest(case), kind="memory") for case in comparison.cases]
    known = latest.get(memory[0])
    return memory if known is not None and known.status == "unsupported" else list(schedule.measured(comparison))


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield a client of the cluster at an address; start one of N processes for `local:N`, and end it."""
    try:
        import dask
        import distributed
    except ImportError:
        raise ClusterError("--cluster needs the package distributed: install it, or the extra 'cluster'") from None
    for logger in ("distributed", "distributed.client"):  # this file writes what matters in sentences
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    if address.partition(":")[0] != "local":
        try:
            client = distributed.Client(address, timeout=PATIENCE_SECONDS)
        except (OSError, ValueError, TypeError) as error:
            remedy = "name the one that `dask scheduler` prints, such as tcp://host:8786, or local:2"
            raise ClusterError(f"no cluster answers at '{address}' ({_first_line(error)}): {remedy}") from None
        with client:
            yield client
        return
    count = re.fullmatch(r"local:([1-9][0-9]?)", address)
    if count is None:
        raise ClusterError(f"'{address}' is no cluster: name the processes of a local one as in local:2")
    with temporary.folder("harness-cluster-") as folder:
        settings = {
            "n_workers": int(count[1]),
            "threads_per_worker": 1,
            "processes": True,
            "dashboard_address": "localhost:0",
            "memory_limit": 0,
            "silence_logs": logging.CRITICAL,
            "resources": {GPU: 1} if gpu.usable_bytes() is not None else {},
        }
        with (
            dask.config.set({"temporary-directory": str(folder), "distributed.worker.profile.enabled": False}),
            ExitStack() as started,
        ):
            with _blocked(signal.SIGINT):
                cluster = started.enter_context(distributed.LocalCluster(**settings))
            yield started.enter_context(distributed.Client(cluster))


@contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal; the threads that start meanwhile, and the processes that those start, never receive it.

    A terminal sends Ctrl-C to all of them, and one is to answer.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it takes the signals off the mask of the thread that starts it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse(address: str, client: Any, schedule: Schedule, names: tuple[str, ...]) -> None:
    """Raise ClusterError unless workers are there for all places, with the same code as here."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE_SECONDS)
    except TimeoutError:
        remedy = f"start one with `dask worker {client.scheduler.address} --nthreads 1`"
        raise ClusterError(f"the cluster at '{address}' has no worker: {remedy}") from None
    workers = client.scheduler_info(n_workers=-1)["workers"]  # some versions tell of the first five alone
    offered = any(worker["resources"].get(GPU) for worker in workers.values())
    for place in dict.fromkeys(comparison.baseline.place for comparison in schedule.plan.comparisons):
        if _on_gpu(place) and not offered:
            remedy = f"start one with `--resources {GPU}=1`, or choose places with --place"
            raise ClusterError(f"no worker of '{address}' offers the resource {GPU} for the place {place}: {remedy}")
    here = Code.here(schedule.plugins)
    for worker, described in client.run(describe, names, on_error="return").items():
        if isinstance(described, plugins.PluginError):
            raise described
        if isinstance(described, Exception):
            raise ClusterError(
                f"the worker {worker} cannot run the harness ({_first_line(described)}): install it there"
            )
        here.refuse_other(described[1], f"the worker {worker} on {described[0]}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _on_gpu(place: Place) -> bool:
    return place.device == "cuda"


@dataclass
class FanOut:
    """One run on a cluster, in the process that writes the records."""

    address: str
    client: Any
    schedule: Schedule
    options: Options
    progress: Progress
    run_id: str
    path: Path
    latest: dict[Slot, Summary]
    inbox: "SimpleQueue[Any]" = field(default_factory=SimpleQueue)
    tasks: dict[int, Any] = field(default_factory=dict)
    attempts: dict[int, str] = field(default_factory=dict)
    lost: Counter[int] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return self.schedule.plan.comparisons

    @property
    def again(self) -> str:
        """The command that goes on after a stop."""
        return "the same command without --fresh" if self.options.fresh else "the same command"

    def run(self) -> None:
        """Hand out every comparison that is not finished, and write what comes until all of them are."""
        planned = list(dict.fromkeys(self.schedule.slots()))
        done = list(finished(self.schedule, self.latest))
        shares = list(zip(map(self.slots, self.comparisons), done, strict=True))
        measured = {slot for slots, is_done in shares if is_done for slot in slots & self.latest.keys()}
        again = {slot for slots, is_done in shares if not is_done for slot in slots}
        left = [slot for slot in planned if slot not in measured or slot in again]
        groups = [frozenset(map(self.schedule.digest, comparison.cases)) for comparison in self.comparisons]
        self.progress.groups(groups, [60 * self.schedule.plan.suite.timing_minutes] * len(groups))
        self.progress.places(self.schedule.places)
        self.progress.begin(left, len(measured - again))
        self.client.subscribe_topic(TOPIC, lambda event: self.inbox.put(event[1]))
        try:
            for number, is_done in enumerate(done):
                if not is_done:
                    self.submit(number)
            while self.tasks:
                before = len(self.tasks)
                self.receive()
                if len(self.tasks) < before:  # rows whose time was decided are not timed on
                    self.progress.left(self.left())
        finally:
            self.client.cancel(list(self.tasks.values()), force=True)

    def slots(self, comparison: Comparison) -> set[Slot]:
        """Return the slots of a comparison, its predictions included."""
        predicted = (Slot(case=self.schedule.digest(case), kind="predict") for case in comparison.cases)
        return {*predicted, *self.schedule.measured(comparison)}

    def left(self) -> list[Slot]:
        """Return the slots that still want a result: all of a comparison that has not begun, since it begins anew."""
        due = set(self.schedule.due(self.latest))
        slots = (
            slot
            for number in self.tasks
            for slot in self.slots(self.comparisons[number])
            if slot in due or number not in self.attempts
        )
        return list(dict.fromkeys(slots))

    def submit(self, number: int) -> None:
        """Give a comparison, by its number in the plan, to the cluster."""
        comparison = self.comparisons[number]
        code = Code.here(self.schedule.plugins)
        plan = replace(self.schedule.plan, comparisons=(comparison,))
        order = Order(plan, self.options, code, self.run_id, number, whole=self.lost[number] > 0)
        task = self.client.submit(
            measure,
            order,
            key=f"harness-{self.run_id}-{number}-{self.lost[number]}",
            resources={GPU: 1} if _on_gpu(comparison.baseline.place) else None,
            pure=False,
        )
        self.tasks[number] = task
        task.add_done_callback(lambda task: self.inbox.put((number, task)))

    def receive(self) -> None:
        """Handle the next message: an event of a worker, or a task that ended."""
        try:
            message = self.inbox.get(timeout=DESERTED_SECONDS)
        except Empty:
            self.refuse_without_workers()
            return
        if isinstance(message, tuple):
            number, task = message
            if self.tasks.get(number) is task:
                self.ended(number, task)
        elif message["run"] == self.run_id and message["comparison"] in self.tasks:
            self.handle(message["comparison"], message)

    def refuse_without_workers(self) -> None:
        """Raise ClusterError where no worker is left that could measure one of the comparisons."""
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        on_gpu = all(_on_gpu(self.comparisons[number].baseline.place) for number in self.tasks)
        if not any(worker["resources"].get(GPU) or not on_gpu for worker in workers):
            what = f"no worker that offers the resource {GPU}" if on_gpu else "no worker"
            remedy = f"what is measured is kept; start workers, and {self.again} resumes"
            raise ClusterError(f"{what} is left at '{self.address}': {remedy}")

    def handle(self, number: int, message: dict[str, Any]) -> None:
        """Take what the worker of a comparison sent: that it began, a warning, a task that starts, or a record."""
        if "begun" in message:
            self.begun(number, message["attempt"], message["begun"])
        if message["attempt"] != self.attempts.get(number):
            return  # of an attempt that was lost
        if "warning" in message:
            self.progress.warn(message["warning"])
        if "started" in message:
            self.progress.start(message["started"], Case.model_validate_json(message["case"]))
        if "record" in message:
            self.received[message["attempt"]] += 1
            record = store.parse(message["record"])
            self.append(record)
            if record.case is not None:
                self.progress.finish(record, record.case)

    def begun(self, number: int, attempt: str, name: str) -> None:
        """Make an attempt the one that counts, and withdraw what one before it measured."""
        if number in self.attempts and not self.may_try_again(number):
            return
        self.attempts[number] = attempt
        self.withdraw(self.comparisons[number], f"withdrawn: its comparison was begun anew on {name}")

    def ended(self, number: int, task: Any) -> None:
        """Take the end of a comparison: it is done, or is given to another worker; raise what else ended it."""
        from distributed import KilledWorker

        if task.status == "cancelled":
            remedy = f"what is measured is kept; {self.again} resumes"
            raise ClusterError(f"the connection to '{self.address}' was lost: {remedy}")
        error = task.exception() if task.status == "error" else None
        if error is None and task.result() == self.received[self.attempts.get(number, "")] and self.is_answered(number):
            del self.tasks[number]
        elif error is None or isinstance(error, KilledWorker):  # which tasks that only stood in line get as well
            self.attempts.pop(number, None)  # counted here, not when it begins
            if self.may_try_again(number):
                self.submit(number)
        else:
            raise error

    def is_answered(self, number: int) -> bool:
        """Return whether every answer of a comparison came: one that another was to give may be lost with it."""
        slots = wanted(self.schedule, self.comparisons[number], self.latest)
        return all(slot in self.latest for slot in slots if slot.kind == "numerics")

    def may_try_again(self, number: int) -> bool:
        """Count a lost worker and return whether to try again; after too many, the rows of the comparison say so."""
        self.lost[number] += 1
        case = self.comparisons[number].baseline
        if self.lost[number] <= LOSSES:
            self.progress.warn(f"the worker that measured on {case.place} was lost: its comparison is run again")
            return True
        self.tasks.pop(number).cancel(force=True)
        reason = f"its worker was lost {self.lost[number]} times: see the logs of the workers, and run it again"
        self.withdraw(self.comparisons[number], reason, all_rows=True)
        self.progress.warn(f"a comparison on {case.place} was given up: {reason}")
        return False

    def withdraw(self, comparison: Comparison, reason: str, all_rows: bool = False) -> None:
        """Replace all peaks and times that were measured of a comparison by records without figures."""
        by_digest = {self.schedule.digest(case): case for case in comparison.cases}
        measured = (slot for slot in self.latest if slot.case in by_digest)  # other blocks and repeats than are planned
        for slot in dict.fromkeys([*self.schedule.measured(comparison), *measured]):
            known = self.latest.get(slot)
            stale = slot.kind in ("memory", "time") and known is not None and known.status != "killed_unknown"
            if stale or (all_rows and slot.kind == "memory"):
                origin = bench.origin(self.schedule, self.run_id).model_copy(update={"machine": {}})
                case, evidence = by_digest[slot.case], {"message": reason}
                self.append(Record(status="killed_unknown", evidence=evidence, slot=slot, case=case, origin=origin))

    def append(self, record: Record) -> None:
        """Write a record as one of this run's: its row, and the attempt that it is."""
        assert record.slot is not None and record.case is not None
        before = self.latest.get(record.slot)
        attempt = 1 if before is None else before.attempt + 1
        origin = record.origin.model_copy(update={"plan": self.schedule.plan_digest, "attempt": attempt})
        position = self.schedule.positions.get(self.schedule.digest(record.case), -1)
        complete = record.model_copy(update={"origin": origin, "position": position})
        store.append(self.path, complete)
        self.latest[record.slot] = Summary.of(complete)
