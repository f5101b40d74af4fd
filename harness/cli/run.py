"""`harness run`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import PluginOption, ResultsOption, SuiteArgument, plan_of, results_of
from harness.cli.progress import Watcher
from harness.cli.screen import err, note, out
from harness.contract import plugins
from harness.report.report import Report
from harness.run import cluster, session


def command(
    path: SuiteArgument,
    results: ResultsOption = Path("results"),
    place: Annotated[list[str] | None, typer.Option("--place", help="Run only these places.")] = None,
    only: Annotated[str | None, typer.Option("-k", help="Run only strategies whose name contains this.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Time rounds, in place of the suite's.", min=0, max=100)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of resuming.")] = False,
    max_bytes: Annotated[int | None, typer.Option(help="Skip cases predicted to need more than this.", min=1)] = None,
    try_all: Annotated[
        bool, typer.Option("--try-all", help="Run cases that are predicted to exceed the machine's memory as well.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ADDRESS", help="Run on Dask workers: tcp://host:8786, or local:2 for two here."
        ),
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Measure every case of a suite and print the tables. Run it again to resume after an interruption."""
    names = tuple(plugin or ())
    loaded = plugins.load(names)
    plan = plan_of(path, loaded, place, only)
    options = session.Options(results, names, rounds, fresh, max_bytes, try_all)
    with Watcher(err) as watcher:
        if address is None:
            file = session.run(plan, loaded, options, watcher)
        else:
            file = cluster.run(address, plan, loaded, options, watcher)
    out.print(Report(tuple(results_of([file], loaded)), loaded).markdown(plan.suite.title), end="")
    note(f"records: {file}")
