"""`harness check`."""

import sys
from typing import Annotated

import typer

from harness.cli.screen import note, out
from harness.contract import plugins
from harness.report.check import text
from harness.verbs.check import FRAMEWORKS, Finding, check


def command(
    names: Annotated[
        list[str], typer.Argument(metavar="PLUGIN", help="A .py file, a module, or the name of an installed plugin.")
    ],
) -> None:
    """Test whether plugins keep their contract, in fresh processes. Takes a minute or more.

    Strategies: what they say of themselves, which parts they rewrite, their batches, their answers, alone and beside
    others. Workloads: their parts, batches and parameters. Instruments: what they add, and what they cost.

    Ends with status 0; with 1 where a promise is broken; with 2 where a plugin cannot be loaded.
    """
    before = set(sys.modules)
    loaded, registered, extra = plugins.named(names)
    frameworks = [name for name in FRAMEWORKS if name in sys.modules and name not in before]
    findings = check(loaded, registered, extra, note)
    if frameworks:
        fault = f"it imports {frameworks[0]} when it is loaded: import it within the functions that need it"
        findings.insert(0, Finding("plugins", faults=(fault,)))
    out.print(text(findings), end="")
    if any(finding.faults for finding in findings):
        raise typer.Exit(1)
