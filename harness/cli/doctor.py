"""`harness doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import completion
from harness.cli.inputs import Cases
from harness.cli.options import OnlyOption, PlacesOption, PluginOption
from harness.cli.screen import note, out, show
from harness.contract import plugins
from harness.machine.checkups import keep
from harness.machine.environment import cache_folder
from harness.refusal import Refusal
from harness.report import limits as limits_report
from harness.report.doctor import text
from harness.verbs import limits as trials
from harness.verbs.doctor import examine, works


def command(
    noise: Annotated[bool, typer.Option(help="Measure the noise between equal runs (most of the time).")] = True,
    limits: Annotated[
        Path | None,
        typer.Option(
            metavar="SUITE",
            help="Try predictions instead: run each case of a suite with its predicted peak as its budget, and then "
            "with what it takes at most.",
            autocompletion=completion.suites,
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="The folder for results, with --limits: by default `results`.")
    ] = None,
    place: PlacesOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Test the instrument on known bytes, measure this machine's noise, and list what would spoil figures.

    With --limits, test how far predictions can be relied on: the share of cases that run out of memory within them.

    Ends with status 0; with 1 where known bytes are seen wrong, or a test of them fails; with 2 where it cannot begin.
    """
    names = tuple(plugin or ())
    if limits is not None:
        if not noise:
            raise Refusal("--no-noise goes without --limits, which measures no noise: leave one of them out")
        loaded = plugins.load(names)
        plan = Cases(limits, place=place, only=only).plan(loaded)
        file, records = trials.run(plan, loaded, names, cache_folder(), results or Path("results"), note)
        show(limits_report.text(records))
        if file.exists():
            note(f"records: {file}")
        return
    for option, value in (("--place", place), ("-k", only), ("--results", results)):
        if value:
            raise Refusal(f"{option} goes with --limits SUITE: without it no suite is run")
    checkup = examine(plugins.load(names), note, noise)
    out.print(text(checkup, noise), end="")
    keep(checkup, cache_folder(), noise)
    if not works(checkup):
        raise typer.Exit(1)
