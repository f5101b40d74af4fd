"""`harness doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.inputs import Cases
from harness.cli.options import OnlyOption, PlaceOption, PluginOption, ResultsOption
from harness.cli.screen import note, out
from harness.contract import plugins
from harness.machine.checkups import keep
from harness.machine.environment import cache_folder
from harness.report import limits as limits_report
from harness.report.doctor import text
from harness.verbs import limits as trials
from harness.verbs.doctor import examine


def command(
    noise: Annotated[bool, typer.Option(help="Measure the noise between equal runs (most of the time).")] = True,
    limits: Annotated[
        Path | None,
        typer.Option(
            metavar="SUITE",
            help="Try predictions instead: run each case of a suite with its predicted peak as its budget, and then "
            "with what it takes at most.",
        ),
    ] = None,
    results: ResultsOption = Path("results"),
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Test the instrument on known bytes, measure this machine's noise, and list what would spoil figures.

    With --limits, test how far predictions can be relied on: the share of cases that run out of memory within them.
    """
    names = tuple(plugin or ())
    loaded = plugins.load(names)
    if limits is not None:
        plan = Cases(limits, place=place, only=only).plan(loaded)
        file, records = trials.run(plan, loaded, names, cache_folder(), results, note)
        out.print(limits_report.text(records), end="")
        if file.exists():
            note(f"records: {file}")
        return
    checkup = examine(loaded, note, noise)
    out.print(text(checkup), end="")
    keep(checkup, cache_folder())
    if any(calibration.good is False for calibration in checkup.calibrations):
        raise typer.Exit(1)
