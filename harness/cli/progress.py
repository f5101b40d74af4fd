"""Show how far a run is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness.records import Case, Record, Slot
from harness.run import session


class Watcher(session.Progress):
    """Show how far a run is: a bar on a terminal, a line for each task elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.live = console, console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not self.live,
        )
        self.started = time.monotonic()
        self.total = self.done = self.resumed = 0
        self.finished: set[Slot] = set()

    def __enter__(self) -> "Watcher":
        self.bar.start()
        self.id = self.bar.add_task("preparing", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def begin(self, total: int, done: int) -> None:
        self.total, self.done, self.resumed = total, done, done
        self.bar.update(self.id, total=total, completed=done)
        if done:
            self.console.print(f"resuming: {done} of {total} results are there")

    def left(self, count: int) -> None:
        self.total = self.done + count  # rows whose time was decided are not timed on
        self.bar.update(self.id, total=self.total)

    def warn(self, sentence: str) -> None:
        self.console.print(f"warning: {sentence}")

    def start(self, task: str, case: Case) -> None:
        self.label = f"{task} {case.place} {case.label}"
        if task == "predict" and not self.live:  # its many results are not listed one by one
            self.console.print("predicting the cases, which may take a minute")
        self.bar.update(self.id, description=self.label)

    def phase(self, name: str) -> None:
        self.bar.update(self.id, description=f"{self.label} [{name}]")

    def finish(self, record: Record, case: Case) -> None:
        kind = record.slot.kind if record.slot else ""
        if record.slot is not None and kind not in ("pilot", "reference"):
            self.finished.add(record.slot)  # what was disturbed is run again, and counts once
            self.done = self.resumed + len(self.finished)
        self.bar.update(self.id, completed=self.done)
        if not self.live and kind != "predict":
            self.console.print(
                f"[{self.done}/{self.total}] {kind} {case.place} {case.label}: {record.status}{self._left()}"
            )

    def _left(self) -> str:
        made = self.done - self.resumed
        if made < 1 or self.done >= self.total:
            return ""
        seconds = (time.monotonic() - self.started) / made * (self.total - self.done)
        return f", about {seconds / 60:.0f} min left"


@contextmanager
def counted(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of a known number are done, on a terminal; yield the function that counts one more."""
    done = 0
    with console.status(f"{what} 0 of {total}") as status:

        def one_more() -> None:
            nonlocal done
            done += 1
            status.update(f"{what} {done} of {total}")

        yield one_more
