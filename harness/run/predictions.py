"""Predict many cases: those of one place in a process for each core, since nothing of a prediction is measured."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from harness import backends
from harness.backends import cards
from harness.contract.plugins import Plugins
from harness.machine import facts
from harness.records import Case, Record, Task
from harness.run import runner, side_by_side
from harness.run.schedule import PREDICTING_SECONDS, misfit

STEPS = 2
"""Steps of a run whose number nobody says."""
PIECE = 8
"""Cases that one process predicts, at most: they are known when it ends, so an interruption loses no more than these.

They have as many ranks, since these share the threads of a process, and libraries take memory for each thread.
"""


def of_cases(
    cases: Sequence[Case],
    corpora: Mapping[str, Any],
    plugins: Plugins,
    names: tuple[str, ...] = (),
    run_id: str = "forecast",
    watch: side_by_side.Watch = lambda phase: None,
    seconds: float = PREDICTING_SECONDS,
    calls: bool = False,
    card: str = "",
    steps: int = STEPS,
) -> Iterator[side_by_side.Result]:
    """Yield each case with its prediction, place by place and in no order; `corpora` are the rows by comparison.

    With `calls` the work of a step is listed call by call. `card` is the GPU that is compiled for where one must be
    named: one of `cards.CARDS`, or a name that has it in it. `steps` are those of the run, where it takes more the more
    batches it reads.

    Cases that no machine could run give the reason. Where one ends the process, or takes longer than `seconds`, the
    next ones go on in another.
    """

    def one_after_another(share: Sequence[Case], watch: side_by_side.Watch) -> Iterator[side_by_side.Result]:
        while share:
            piece = as_many_ranks(share)[:PIECE]
            task = Task(
                kind="predict",
                cases=tuple(piece),
                run_id=run_id,
                parent=os.getpid(),
                folder="",
                corpora={case.comparison_key: corpora.get(case.comparison_key) for case in piece},
                plugins=names,
                steps=steps,
                calls=calls,
                environment={cards.VARIABLE: card} if card else {},
            )
            records = runner.run(task, facts.threads(), seconds, watch)
            ended = next(
                (at for at, record in enumerate(records) if record.origin.worker_seconds is None), len(piece) - 1
            )
            yield from zip(piece[: ended + 1], records[: ended + 1], strict=True)
            share = share[ended + 1 :]

    for place in dict.fromkeys(case.place for case in cases):
        open_: list[Case] = []
        for case in cases:
            if case.place == place and (reason := impossible(plugins, case)) is not None:
                yield case, Record(status="unsupported", evidence={"message": reason})
            elif case.place == place:
                open_.append(case)
        open_.sort(key=lambda case: case.ranks)
        yield from side_by_side.shared_out(open_, one_after_another, watch)


def as_many_ranks(cases: Sequence[Case]) -> Sequence[Case]:
    """Return the first of some cases, up to one with another number of ranks."""
    return list(takewhile(lambda case: case.ranks == cases[0].ranks, cases))


def impossible(plugins: Plugins, case: Case) -> str | None:
    """Return why a case cannot be predicted here, or nowhere be run: a GPU may be absent, the framework may not."""
    return backends.absent(case.place.backend, "cpu") or misfit(plugins, case)
