"""Predict many cases: all of one place in one process, which measures nothing of itself."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness import backends, runner
from harness.plugins import Plugins
from harness.records import Case, Record, Task
from harness.schedule import obstacle
from harness.types import Place

STEPS = 2
"""Steps of a prediction: the moments appear in the first update, so the second step holds everything."""
SECONDS = 300.0
"""What one case may take."""


def of_cases(
    cases: Sequence[Case],
    corpora: Mapping[str, Any],
    plugins: Plugins,
    names: tuple[str, ...] = (),
    run_id: str = "forecast",
    watch: Callable[[str], None] = lambda phase: None,
) -> Iterator[tuple[Case, Record]]:
    """Yield each case with its prediction, place by place; `corpora` are the rows by group.

    Cases that no machine could run give the reason. Where one ends the process, the next ones go on in another.
    """
    for place in dict.fromkeys(case.place for case in cases):
        open_: list[Case] = []
        for case in cases:
            if case.place == place and (reason := impossible(plugins, case)) is not None:
                yield case, Record(status="unsupported", evidence={"message": reason})
            elif case.place == place:
                open_.append(case)
        while open_:
            task = Task(
                kind="predict",
                cases=tuple(open_),
                run_id=run_id,
                parent=os.getpid(),
                folder="",
                corpora={case.group: corpora.get(case.group) for case in open_},
                plugins=names,
                steps=STEPS,
            )
            found = runner.run(task, len(os.sched_getaffinity(0)), SECONDS * len(open_), watch)
            ended = next((at for at, record in enumerate(found) if record.worker_seconds is None), len(open_) - 1)
            yield from zip(open_[: ended + 1], found[: ended + 1], strict=True)
            open_ = open_[ended + 1 :]


def impossible(plugins: Plugins, case: Case) -> str | None:
    """Say why a case cannot be predicted here: a GPU may be absent, the framework may not."""
    at = Place.parse(case.place)
    if (absent := backends.absent(at.backend, "cpu")) is not None:
        return absent
    told = obstacle(plugins, case)
    return None if told == backends.absent(at.backend, at.device) else told
