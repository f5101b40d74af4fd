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
    with ExitStack() as running:
        workers = []
        for number, task in enumerate(tasks):
            starting(number)
            worker = running.enter_context(runner.worker(task, threads, deadline, watch))
            workers.append(worker)
            worker.attend()
        for cycle in range(most := max(map(_turns, tasks))):
            due = [worker for worker in workers if worker.waits and _is_due(_turns(worker.task), cycle, most)]
            for worker in order.sample(due, len(due)):
                worker.go_on()
        for worker in workers:  # whole epochs may need one turn more
            while worker.waits:
                worker.go_on()
        return [worker.records()[0] for worker in workers]


def _turns(task: Task) -> int:
    return min(task.turns, task.steps)


def _is_due(turns: int, cycle: int, cycles: int) -> bool:
    """Check whether a process with so many turns has one in a cycle: who has fewer than others has them spread out."""
    return turns * (cycle + 1) // cycles > turns * cycle // cycles
