"""Show how far a run is, how long it will take, and each table as soon as it is complete."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from harness.cli import timing
from harness.cli.pace import Pace
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.records import Case, Record, Slot
from harness.report import table
from harness.report.text import visible
from harness.report.words import titles_of
from harness.run import bench
from harness.run.schedule import worker_seconds
from harness.suite.plan import Comparison, Plan
from harness.verdicts import judge

AGAIN = "again"
"""What is counted like a kind of task: memory that is measured again."""
AT_ONCE_SECONDS = 1.0
"""Within how many seconds from the begin everything ends that was stored."""
LINE_SECONDS = 30.0
"""How often a line says how far predictions are where nobody watches."""


class Watcher(bench.Progress):
    """Show how far a run is: a bar on a terminal, a line for each task elsewhere; print tables as they come."""

    def __init__(
        self,
        console: Console,
        plugins: Plugins,
        out: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.title_of: dict[str, str] = {}
        self.console, self.live = console, _is_watched(console)
        self.plugins, self.out = plugins, out
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),  # phases stand in brackets
            BarColumn(),
            TextColumn("{task.fields[many]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self.live,
        )
        self.pace = Pace()
        self.done = 0
        self.open: dict[Slot, None] = {}
        self.timings: list[timing.Timing] = []
        self.again: dict[Slot, float] = {}
        self.rows, self.repeats = 0, 0
        self.ends = 0.0
        self._count()
        self.label = "preparing"
        self.printed: set[str] = set()
        self.predictions = Countdown("predicted", 0)

    def __enter__(self) -> "Watcher":
        self.bar.start()
        self.id = self.bar.add_task("preparing", total=None, left="", many="")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def plan(self, plan: Plan) -> None:
        self.title_of = titles_of(comparison.baseline for comparison in plan.comparisons)

    def groups(self, groups: Sequence[frozenset[str]], seconds: Sequence[float]) -> None:
        self.timings = list(map(timing.Timing, groups, seconds))
        self._count()

    def places(self, places: Mapping[str, Place]) -> None:
        self.pace.at(places)

    def unsupported(self, cases: frozenset[str]) -> None:
        self.pace.unsupported = cases
        self._count()

    def predicting(self, cases: int) -> None:
        self.predictions = Countdown("predicted", cases)
        self.bar.update(self.id, description=f"predicting {cases} combinations")
        if not self.live and cases:
            self.console.print(f"predicting {cases} combinations")

    def predicted(self, case: Case) -> None:
        self.predictions.one_more()
        if not self.live and self.predictions.is_due():
            self.console.print(str(self.predictions))
        self.bar.update(self.id, description=visible(f"{self.predictions}: {case.place} {case.label}"))

    def begin(self, slots: Sequence[Slot], done: int) -> None:
        self.done = done
        self.left(slots)
        if done:
            self.console.print(f"resuming: {self.many} results are there")

    def left(self, slots: Sequence[Slot]) -> None:
        self.open = dict.fromkeys(slots)  # rows whose time was decided are not timed on
        self._count()
        self.pace.begin()
        self._show()

    def earlier(self, seconds: Mapping[Slot, float]) -> None:
        self.pace.earlier(seconds)
        for slot, each in seconds.items():
            if slot.case in self.group_of and slot.kind == "time":
                self.timings[self.group_of[slot.case]].earlier(slot, each)
            elif slot.case in self.group_of and slot.repeat:
                self.again[slot] = each

    def repeated(self, cases: Collection[str], slots: Sequence[Slot]) -> None:
        self.rows += len(cases)
        self.repeats += len(slots)
        self.again = {slot: seconds for slot, seconds in self.again.items() if slot.case not in cases}
        for slot in slots:
            self.open[slot] = None
            self._add(slot, 1)

    def timed(self, cases: Collection[str], number: int, members: Collection[str]) -> None:
        for slot in [each for each in self.open if each.kind == "time" and each.case in cases]:
            if slot.round >= number and slot.case not in members:
                del self.open[slot]
                self._add(slot, -1)

    @property
    def many(self) -> str:
        """The results that there are, and of how many: rows leave as their time is decided, or are measured again."""
        return f"{self.done} of about {self.done + len(self.open)}" if self.open else f"{self.done}"

    def warn(self, sentence: str) -> None:
        self.console.print(visible(f"warning: {sentence}"))

    def start(self, task: str, case: Case) -> None:
        self.label = visible(f"{task} {case.place} {case.label}")
        self.bar.update(self.id, description=self.label)

    def phase(self, name: str) -> None:
        self.bar.update(self.id, description=visible(f"{self.label} [{name}]"), left=self._left())

    def finish(self, record: Record, case: Case) -> None:
        slot = record.slot
        kind = slot.kind if slot else ""
        planned = slot.model_copy(update={"block": 0}) if slot is not None else None
        is_new = planned in self.open
        if planned is not None and is_new:  # what was disturbed is run again, and counts once
            del self.open[planned]
            self._add(planned, -1)
            self.done += 1
        if slot is not None:
            self._learn(record, slot, case, is_new)
        self._show()
        if not self.live and kind != "predict":
            left = ", ".join(filter(None, [record.status, self._left()]))
            line = f"[{self.many}] {kind} {case.place} {case.label}: {left}"
            self.console.print(visible(line))

    def _learn(self, record: Record, slot: Slot, case: Case, is_new: bool) -> None:
        """Learn from a task that has ended how long others will take."""
        if slot.kind == "predict":
            self.pace.predicted(slot.case, record.prediction.predicted_work, case.place)
        self.pace.ended(slot, whole=record.status == "ok")
        if (at := self.group_of.get(slot.case)) is not None:
            self.timings[at].place = case.place
            if slot.kind == "time":
                self.timings[at].ended(slot, worker_seconds(record), is_new)

    def comparison(self, comparison: Comparison, records: Sequence[Record]) -> None:
        """Print the table of a comparison that this run measured whole; of others the run prints it at the end."""
        tables = judge.judge(records)
        rows = sum(len(each.rows) for each in tables)
        if rows < len(comparison.cases):
            return
        self.printed.add(comparison.baseline.comparison_key)
        self.out(table.markdown(tables, self.plugins, title_of=self.title_of))

    def _count(self) -> None:
        """Count the open results: rounds by group and round, all others by kind and case."""
        self.group_of = {case: at for at, group in enumerate(self.timings) for case in group.cases}
        self.rounds: dict[int, Counter[int]] = defaultdict(Counter)
        self.others: dict[str, Counter[str]] = defaultdict(Counter)
        for slot in self.open:
            self._add(slot, 1)

    def _add(self, slot: Slot, many: int) -> None:
        if slot.kind != "time" or slot.case not in self.group_of:
            self.others[AGAIN if slot.repeat else slot.kind][slot.case] += many
        elif slot.case not in self.pace.unsupported:
            self.rounds[self.group_of[slot.case]][slot.round] += many

    def _show(self) -> None:
        self.ends = time.monotonic() + self._seconds()
        total = self.done + len(self.open)
        self.bar.update(self.id, total=total, completed=self.done, many=self.many, left=self._left())

    def _left(self) -> str:
        """Say how long the open results will take, from what is known since the last one ended."""
        if not self.open:
            return ""
        return _left(self.ends - time.monotonic())

    def _seconds(self) -> float:
        """Return how long the open results will take, and what will be measured again of rows near a bound."""
        seconds = timing.left(self.timings, self.rounds, self.pace)
        for kind, cases in self.others.items():
            seconds += self.pace.left("memory" if kind == AGAIN else kind, cases)
        if self.pace.before:
            return seconds + sum(self.again.values())
        return seconds + self.repeats / max(1, self.rows) * self.pace.left("memory", self.others["memory"])


def _is_watched(console: Console) -> bool:
    """Check whether a terminal shows what is printed, and not a file that FORCE_COLOR asks for colours in."""
    return console.is_terminal and console.file.isatty()


def _left(seconds: float) -> str:
    whole = max(1, round(seconds))
    return f"about {whole / 60:.0f} min left" if whole > 90 else f"about {whole} s left"


class Countdown:
    """How many of so many like tasks are done, and how long the others will take; without a `total` just how many.

    What ends at once was stored, and shows nothing of how long the others take.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self.stored = what, total, 0, 0
        self.began = self.shown = time.monotonic()

    def one_more(self) -> None:
        """Note that one more has ended now."""
        self.done += 1
        if time.monotonic() - self.began < AT_ONCE_SECONDS:
            self.stored = self.done

    def is_due(self) -> bool:
        """Check whether it is time for another line where nobody watches."""
        due = time.monotonic() - self.shown >= LINE_SECONDS
        self.shown = time.monotonic() if due else self.shown
        return due

    def __str__(self) -> str:
        open_, taken = self.total - self.done, self.done - self.stored
        left = f", {_left(open_ * (time.monotonic() - self.began) / taken)}" if open_ > 0 and taken else ""
        return f"{self.what} {self.done}" + (f" of {self.total}{left}" if open_ >= 0 else "")


@contextmanager
def counted(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of a known number are done, and how long the others will take; give what counts one more.

    On a terminal that is a line that changes, elsewhere one now and then.
    """
    count = Countdown(what, total)
    with console.status(str(count)) if _is_watched(console) else nullcontext() as status:

        def one_more() -> None:
            count.one_more()
            if status is not None:
                status.update(str(count))
            elif count.is_due():
                console.print(str(count))

        yield one_more
