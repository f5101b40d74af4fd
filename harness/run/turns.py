"""Time the processes of a block in turns: what drifts within seconds meets all of them alike."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random

from harness.records import Record, Task
from harness.run import runner

TURNS = 16
"""Into how many turns the timed steps of a process are parted, where there are so many steps. Equal processes scatter
by a third of what they do one after the other, so that an eighth of the rounds decides
(`tests/benchmarks/turns_figures.py`)."""


def run(
    tasks: Sequence[Task],
    threads: int,
    deadline: float,
    watch: runner.Watch,
    order: Random,
    starting: Callable[[int], None] = lambda number: None,
) -> list[Record]:
    """Run tasks of time and return the record of each, in their order.

    One after the other starts, warms up and stops; then each goes on for a turn, cycle after cycle, in an order that is
    drawn anew for each. `starting` hears the place of the task that starts. `deadline` is in seconds, those in which a
    process is stopped not counted.
    """
    records: dict[int, Record] = {}
    with ExitStack() as running:
        workers: dict[int, runner.Worker] = {}

        def attend(number: int, turn: Callable[[], None]) -> None:
            turn()
            if not workers[number].waits:  # what has ended, or has to be ended, is to disturb nobody
                (records[number],) = workers[number].records()

        for number, task in enumerate(tasks):
            starting(number)
            workers[number] = running.enter_context(runner.worker(task, threads, deadline, watch))
            attend(number, workers[number].attend)
        for cycle in range(cycles := max(map(_turns, tasks))):
            due = [at for at, task in enumerate(tasks) if at not in records and _is_due(_turns(task), cycle, cycles)]
            for number in sorted(due, key=lambda _: order.random()):
                attend(number, workers[number].go_on)
        for number in workers.keys() - records.keys():  # a plugin's own way to measure may rest more often
            (records[number],) = workers[number].records()
    return [records[number] for number in range(len(tasks))]


def _turns(task: Task) -> int:
    return min(task.turns, task.steps)


def _is_due(turns: int, cycle: int, cycles: int) -> bool:
    """Check whether a process with so many turns has one in a cycle: who has fewer than others has them spread out."""
    before, after = ((2 * turns * at + cycles) // (2 * cycles) for at in (cycle, cycle + 1))
    return after > before
