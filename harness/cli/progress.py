"""Show how far a run is, how long it will take, and each table as soon as it is complete."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.contract.plugins import Plugins
from harness.records import Case, Record, Slot
from harness.records.roofline import Operations
from harness.report import table
from harness.report.text import visible
from harness.run import bench
from harness.run.schedule import worker_seconds
from harness.suite.plan import Comparison
from harness.verdicts import judge

USUAL_SECONDS = {"predict": 0.5, "numerics": 4.0, "memory": 3.0, "time": 2.0}
"""How long a task takes, until this run has shown it; one of memory, beside its steps."""
STEPS = 6
"""Steps of a task of memory, until this run has shown how long it takes."""
APART = -1
"""The place, among the groups that are timed together, of what is in none."""
FLOPS = {"cpu": 1e11, "cuda": 1e14}
BANDWIDTH = {"cpu": 1e10, "cuda": 1e12}
"""What a device does in a second, until this run has shown it."""


class Pace:
    """How long the tasks of each kind take, learned from those that ended; for memory, by the work of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.count: Counter[str] = Counter()
        self.step_seconds: dict[str, float] = {}
        self.ran: dict[str, float] = {}
        self.unsupported: frozenset[str] = frozenset()
        self.last = time.monotonic()

    def predicted(self, case: str, work: Sequence[Operations], device: str) -> None:
        """Note the work of a step of a case on a device."""
        if work:
            flops, bandwidth = FLOPS[device], BANDWIDTH[device]
            self.step_seconds[case] = sum(each.flops / flops + each.moved / bandwidth for each in work)

    def ended(self, slot: Slot | None, whole: bool) -> None:
        """Note that a task has ended now; of memory, what was cut short shows nothing."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        kind = slot.kind if slot else ""
        if slot is not None and slot.case in self.unsupported and kind != "predict":
            return
        if slot is not None and kind == "memory" and slot.case in self.step_seconds:
            if whole:
                self.ran[slot.case] = seconds
        else:
            self.seconds[kind] += seconds
            self.count[kind] += 1

    def left(self, kind: str, cases: Mapping[str, int]) -> float:
        """Return the seconds that tasks of a kind will take, so many of each case."""
        if kind != "predict":
            cases = {case: many for case, many in cases.items() if case not in self.unsupported}
        count = sum(cases.values())
        if kind != "memory":
            return count * self.usual(kind)
        known = {case: many for case, many in cases.items() if case in self.step_seconds}
        if not (those := sum(known.values())):
            return count * (fmean(self.ran.values()) if self.ran else self.usual(kind))
        steps = sum(many * self.step_seconds[case] for case, many in known.items())
        return count / those * (those * USUAL_SECONDS["memory"] + self._ratio() * steps)

    def usual(self, kind: str) -> float:
        """Return the seconds that a task of a kind takes."""
        return self.seconds[kind] / self.count[kind] if self.count[kind] else USUAL_SECONDS.get(kind, 2.0)

    def _ratio(self) -> float:
        """Return the seconds that the steps of a task of memory take, as a multiple of one by its work."""
        steps = sum(max(0.0, seconds - USUAL_SECONDS["memory"]) for seconds in self.ran.values())
        return steps / sum(self.step_seconds[each] for each in self.ran) if self.ran else STEPS


@dataclass
class Timing:
    """Cases that are timed together, by digest, the seconds that are left for their rounds, and the round they are in.

    A round that has begun is timed to its end, however long it takes.
    """

    cases: frozenset[str]
    seconds: float
    round: int = -1


class Watcher(bench.Progress):
    """Show how far a run is: a bar on a terminal, a line for each task elsewhere; print tables as they come."""

    def __init__(self, console: Console, plugins: Plugins, out: Callable[[str], None] = lambda text: None) -> None:
        self.console, self.live = console, _is_watched(console)
        self.plugins, self.out = plugins, out
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),  # phases stand in brackets
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self.live,
        )
        self.pace = Pace()
        self.done = 0
        self.open: dict[Slot, None] = {}
        self.timings: list[Timing] = []
        self._count()
        self.label = "preparing"
        self.printed: set[str] = set()

    def __enter__(self) -> "Watcher":
        self.bar.start()
        self.id = self.bar.add_task("preparing", total=None, left="")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def groups(self, groups: Sequence[frozenset[str]], seconds: Sequence[float]) -> None:
        self.timings = list(map(Timing, groups, seconds))
        self._count()

    def unsupported(self, cases: frozenset[str]) -> None:
        self.pace.unsupported = cases
        self._count()

    def begin(self, slots: Sequence[Slot], done: int) -> None:
        self.done = done
        self.left(slots)
        if done:
            self.console.print(f"resuming: {done} of {self.total} results are there")

    def left(self, slots: Sequence[Slot]) -> None:
        self.open = dict.fromkeys(slots)  # rows whose time was decided are not timed on
        self._count()
        self.pace.last = time.monotonic()
        self._show()

    @property
    def total(self) -> int:
        """The results that there will be at most: rows leave as their time is decided."""
        return self.done + len(self.open)

    def warn(self, sentence: str) -> None:
        self.console.print(visible(f"warning: {sentence}"))

    def start(self, task: str, case: Case) -> None:
        self.label = visible(f"{task} {case.place} {case.label}")
        self.bar.update(self.id, description=self.label)

    def phase(self, name: str) -> None:
        self.bar.update(self.id, description=visible(f"{self.label} [{name}]"))

    def finish(self, record: Record, case: Case) -> None:
        slot = record.slot
        kind = slot.kind if slot else ""
        if slot is not None and kind not in ("pilot", "reference"):
            planned = slot.model_copy(update={"block": 0})
            if planned in self.open:  # what was disturbed is run again, and counts once
                del self.open[planned]
                self._add(planned, -1)
                self.done += 1
        if slot is not None and kind == "time":
            for timing in self.timings:
                if slot.case in timing.cases:
                    timing.seconds -= worker_seconds(record)
                    timing.round = slot.round
        if slot is not None and kind == "predict":
            self.pace.predicted(slot.case, record.prediction.predicted_work, case.place.device)
        self.pace.ended(slot, whole=record.status == "ok")
        self._show()
        if not self.live and kind != "predict":
            left = f", {self._left()}" if self.open else ""
            line = f"[{self.done}/{self.total}] {kind} {case.place} {case.label}: {record.status}{left}"
            self.console.print(visible(line))

    def comparison(self, comparison: Comparison, records: Sequence[Record]) -> None:
        """Print the table of a comparison that this run measured whole; of others the run prints it at the end."""
        tables = judge.judge(records)
        rows = sum(len(each.rows) for each in tables)
        if rows < len(comparison.cases):
            return
        self.printed.add(comparison.baseline.comparison_key)
        self.out(table.markdown(tables, self.plugins))

    def _count(self) -> None:
        """Count the open results: rounds by group and round, all others by kind and case."""
        self.groups_of: dict[str, int] = {}
        for at, timing in enumerate(self.timings):
            for case in timing.cases:
                self.groups_of.setdefault(case, at)
        self.rounds: dict[int, Counter[int]] = defaultdict(Counter)
        self.others: dict[str, Counter[str]] = defaultdict(Counter)
        for slot in self.open:
            self._add(slot, 1)

    def _add(self, slot: Slot, many: int) -> None:
        if slot.kind != "time":
            self.others[slot.kind][slot.case] += many
        elif slot.case not in self.pace.unsupported:
            self.rounds[self.groups_of.get(slot.case, APART)][slot.round] += many

    def _show(self) -> None:
        self.bar.update(self.id, total=self.total, completed=self.done, left=self._left() if self.open else "")

    def _left(self) -> str:
        seconds = self._seconds()
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {max(1, round(seconds))} s left"

    def _seconds(self) -> float:
        """Return how long the open results will take at most: no round begins after its comparison's time is spent."""
        seconds = sum(self.pace.left(kind, cases) for kind, cases in self.others.items())
        each = self.pace.usual("time")
        for at, rounds in self.rounds.items():
            whole = each * rounds.total()
            if at != APART:
                timing = self.timings[at]
                begun = each * sum(many for number, many in rounds.items() if number <= timing.round)
                whole = max(begun, min(whole, timing.seconds))
            seconds += whole
        return seconds


def _is_watched(console: Console) -> bool:
    """Check whether a terminal shows what is printed, and not a file that FORCE_COLOR asks for colours in."""
    return console.is_terminal and console.file.isatty()


@contextmanager
def counted(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of a known number are done, while somebody watches; give the function that counts one more."""
    if not _is_watched(console):
        yield lambda: None
        return
    done = 0
    with console.status(f"{what} 0 of {total}") as status:

        def one_more() -> None:
            nonlocal done
            done += 1
            status.update(f"{what} {done} of {total}")

        yield one_more
