"""`harness doctor`."""

from typing import Annotated

import typer

from harness.cli.options import PluginOption
from harness.cli.screen import note, out
from harness.contract import plugins
from harness.machine.checkups import keep
from harness.report.doctor import text
from harness.run import session
from harness.verbs.doctor import examine


def command(
    noise: Annotated[bool, typer.Option(help="Measure the noise between equal runs (most of the time).")] = True,
    plugin: PluginOption = None,
) -> None:
    """Test the instrument on known bytes, measure this machine's noise, and list what would spoil figures."""
    loaded = plugins.load(tuple(plugin or ()))
    checkup = examine(loaded, note, noise)
    out.print(text(checkup), end="")
    keep(checkup, session.cache_folder())
    if any(calibration.good is False for calibration in checkup.calibrations):
        raise typer.Exit(1)
