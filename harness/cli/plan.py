"""`harness plan`."""

from dataclasses import replace
from typing import Annotated

import typer

from harness.cli.groups import together
from harness.cli.inputs import Cases, Room, among_all
from harness.cli.progress import counted
from harness.cli.screen import err, out, show
from harness.contract import plugins
from harness.report.memory import explained
from harness.report.plan import halved, tables
from harness.run import template
from harness.verbs.plan import named, of_cases, of_plan
from harness.verbs.remedies import all_too_large, remedies

TIMING_SECONDS = 4.0
"""How long a plan times operators: it is asked whether something fits, and each plan times some more of them."""


@together
def command(
    cases: Cases,
    room: Room,
    explain: Annotated[
        str | None, typer.Option(help="A case, as the table names it: what stands at its peak, in torch.")
    ] = None,
) -> None:
    """Predict every case of a suite without running any: its peak, whether it fits, how times of a step compare.

    Ends with status 1 where nothing of it can be predicted beside baselines.
    """
    names = cases.plugins
    loaded = plugins.load(names)
    plan = cases.plan(loaded, room.budget, room.on_gpu)
    if explain is not None:
        machine = room.machine(())  # no rates: nothing is timed
        rows = of_cases(named(plan.cases, explain), plan, loaded, names, machine, calls=False)
        show(explained(rows, loaded.strategies))
        return
    machine = replace(room.machine(plan.places), timing_seconds=TIMING_SECONDS)
    with template.forking():
        with counted(err, "predicted", len(plan.cases)) as count_one:
            comparisons = of_plan(plan, loaded, names, machine, lambda case: count_one())
        for number, (rows, text) in enumerate(zip(comparisons, tables(comparisons), strict=True)):
            show("\n" * bool(number) + text)
            if change := halved(remedies(rows, plan, loaded, names, machine)):
                show("\n" + change)
    if any(all_too_large(rows) for rows in comparisons):
        out.print(f"\n{among_all(cases, room)}")
    everything = [row for rows in comparisons for row in rows]
    asked = [row for row in everything if not row.case.is_baseline and not row.case.is_control] or everything
    if not any(row.peak_bytes is not None for row in asked):
        raise typer.Exit(1)
