"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

SuiteArgument = Annotated[Path, typer.Argument(metavar="SUITE", help="A suite: a YAML file.")]
PluginOption = Annotated[list[str] | None, typer.Option("--plugin", help="A plugin: a .py file or a module.")]
PlaceOption = Annotated[list[str] | None, typer.Option("--place", help="Only these places.")]
OnlyOption = Annotated[str | None, typer.Option("-k", help="Only strategies whose name contains this.")]
ResultsOption = Annotated[Path, typer.Option(help="The folder for results.")]
BudgetOption = Annotated[str | None, typer.Option(help="What each case may take, in place of the suite's: 8GiB.")]
MemoryOption = Annotated[str | None, typer.Option(help="The memory of the machine, in place of this one's: 16GiB.")]
GpuMemoryOption = Annotated[str | None, typer.Option(help="The memory of the GPU, in place of this one's: 80GiB.")]
PredictOnlyOption = Annotated[bool, typer.Option("--predict-only", help="Answer from predictions alone.")]
