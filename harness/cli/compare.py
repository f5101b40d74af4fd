"""`harness compare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.inputs import results_of
from harness.cli.screen import note, show
from harness.contract import plugins
from harness.records.store import StoreError
from harness.report.compare import text
from harness.verbs.compare import Condition, compare, differences, of_suites
from harness.verbs.pairing import completed
from harness.verdicts.judge import Comparison, judge


def command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A results file, or a folder of them.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another of the same cases.")],
    fail_on: Annotated[
        list[str] | None, typer.Option(help="End with status 1 on this: peak>5%, time>10%, answer, status, missing.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what stayed the same as well.")] = False,
) -> None:
    """Compare two runs of the same cases, for a pull request: what became better or worse beyond the noise of both.

    Ends with status 0; with 1 where something met a condition of --fail-on; with 2 where it could not compare.
    """
    conditions = [Condition.parse(each) for each in fail_on or ()]
    loaded = plugins.load()
    before, after = (results_of([path], loaded) for path in (old, new))
    judged = ([table for each in run for table in judge(each.records)] for run in (before, after))
    tables = [completed(each, loaded.workloads) for each in judged]
    changes = compare(*tables)
    if not any(change.of_both for change in changes):
        raise StoreError(_why_nothing(old, new, *tables))
    notes = differences(*([record for each in run for record in each.records] for run in (before, after)))
    notes += of_suites(*tables)
    show(text(changes, notes, everything))
    failing = [change for change in changes if any(condition.met(change) for condition in conditions)]
    if failing:
        note(f"harness: figures that became worse than --fail-on allows, or were not measured: {len(failing)}")
        raise typer.Exit(1)


def _why_nothing(old: Path, new: Path, before: Sequence[Comparison], after: Sequence[Comparison]) -> str:
    """Say why nothing can be compared: other cases, or none that has a figure, such as the limits of `harness fit`."""
    cases, others = ({row.case.digest() for table in run for row in table.rows} for run in (before, after))
    if cases | others and not cases & others:
        return f"'{old}' and '{new}' have no case in common: compare two runs of one suite"
    if all(any(row.peak_bytes for table in run for row in table.rows) for run in (before, after)):
        return f"'{old}' and '{new}' have their common cases in several suites each: name the results of one suite"
    return f"'{old}' and '{new}' have no figure to compare: measure the suite with `harness run`"
