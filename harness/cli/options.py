"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

from harness.backends.cards import CARDS
from harness.cli import completion
from harness.suite.bounds import MAX_RANKS

SuiteArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[SUITE]",
        help="A suite: a YAML file, or the name of one in suites/.",
        autocompletion=completion.suites,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="A model in place of a suite: a published name such as qwen3-8b, or the path of a config.json.",
        autocompletion=completion.models,
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        help="Length of each sequence, with --model: by default 2,048; a search over tokens begins at 128.",
        min=1,
        max=1 << 26,
    ),
]
BatchOption = Annotated[
    int | None, typer.Option(help="Sequences in a batch, with --model: by default 1.", min=1, max=1 << 20)
]
RanksOption = Annotated[
    int | None,
    typer.Option(help="Divide the run among so many GPUs, or processes on a CPU, with --model.", min=2, max=MAX_RANKS),
]
DocumentsOption = Annotated[
    int | None,
    typer.Option(help="Train on so many texts of all lengths up to --tokens, with --model.", min=1, max=1 << 30),
]
EvaluationsOption = Annotated[
    int | None,
    typer.Option(
        help="Evaluate on so many batches after the steps, save and resume, with --model.", min=1, max=1 << 20
    ),
]
WithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help="A row of the table, with --model: checkpoint,chunked_loss(chunk=512). Repeat it for more rows.",
        autocompletion=completion.rows,
    ),
]
PluginOption = Annotated[list[str] | None, typer.Option("--plugin", help="A plugin: a .py file or a module.")]
PlaceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--place", help="Only these places of the suite; with --model, where it runs.", autocompletion=completion.places
    ),
]
PlacesOption = Annotated[
    list[str] | None,
    typer.Option("--place", help="Only these places of the suite.", autocompletion=completion.places),
]
OnlyOption = Annotated[
    str | None, typer.Option("-k", help="Only rows whose name contains this; baseline and control stay.")
]
ResultsOption = Annotated[Path, typer.Option(help="The folder for results.")]
BudgetOption = Annotated[str | None, typer.Option(help="What each case may take, in place of the suite's: 8GiB.")]
MemoryOption = Annotated[str | None, typer.Option(help="The memory of the machine, in place of this one's: 16GiB.")]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="The memory of the GPU, in place of this one's: 80GiB. Where no GPU is here or named, it is an H100's."
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", help=f"A GPU to suppose: {', '.join(CARDS)}.", autocompletion=completion.cards),
]
PredictOnlyOption = Annotated[bool, typer.Option("--predict-only", help="Answer from predictions alone.")]
