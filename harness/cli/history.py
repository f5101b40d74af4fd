"""`harness history`."""

from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.screen import note, show
from harness.contract import plugins
from harness.records import store
from harness.records.store import StoreError
from harness.report import charts
from harness.report.charts.commits import commits
from harness.report.history import text
from harness.report.results import read
from harness.verbs.history import Run, series
from harness.verbs.pairing import completed


class By(StrEnum):
    """What orders the runs."""

    commit = auto()


def command(
    folder: Annotated[Path, typer.Argument(metavar="RESULTS", help="A folder of results: all its files are read.")],
    by: Annotated[By, typer.Option(help="What orders the runs: commits, the only order there is.")] = By.commit,
    only: Annotated[str | None, typer.Option("-k", help="Only rows whose name contains this.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show rows that did not change as well.")] = False,
    pictures: Annotated[Path | None, typer.Option(help="A folder to draw a picture of each suite into.")] = None,
) -> None:
    """Show how the rows of a suite changed from run to run: their peaks and times by commit, and where they jumped.

    A peak jumps by more than 1 % and the meters' resolution; a time by more than 5 % and its noise.
    """
    loaded = plugins.load()
    if folder.is_file():
        raise StoreError(f"'{folder}' is a file, of one run: name the folder that it lies in")
    files = sorted(store.below(folder), key=lambda file: file.name)
    if not files:
        raise StoreError(f"there are no results in '{folder}': run a suite first")
    results = read(files, lambda problem: note(f"warning: {problem}"), loaded.aliases)
    runs = [
        Run(each.folder, each.records, completed(each.tables, loaded.workloads))
        for each in results
        if not (each.searched or each.advice)
    ]
    chosen = [each for each in series(runs) if only is None or only in each.case.label]
    if only is not None and not chosen:
        raise StoreError(f"no row in '{folder}' has a name that contains '{only}': leave out -k to see all of them")
    show(text(chosen, everything))
    if pictures is not None:
        drawn = False
        for suite in dict.fromkeys(each.suite for each in chosen):
            chart = commits([each for each in chosen if each.suite == suite], f"{suite} over commits")
            if chart is not None:
                drawn = True
                for path in charts.save({"history": chart}, pictures, suite):
                    note(f"picture: {path}")
        if not drawn:
            note("note: nothing to draw: a picture needs the peak of a row that is in more than one run")
