"""`harness new`."""

from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.screen import note, out
from harness.contract import plugins
from harness.verbs import new


class Kind(StrEnum):
    """What can be begun."""

    strategy = auto()


def command(
    kind: Annotated[Kind, typer.Argument(help="What to begin: a strategy.")],
    name: Annotated[str, typer.Argument(help="Its name: the term that a practitioner would type.")],
    folder: Annotated[Path, typer.Option(help="Where to write its files.")] = Path("."),
) -> None:
    """Begin a strategy: write a file that keeps the contract as it is, its test, and a suite with it as a row.

    The file is that of `feed_checkpoint` under the new name: change its docstring and its functions.
    """
    made = new.strategy(name, folder, plugins.load())
    new.write(made)
    for path in made.files:
        out.print(str(path))
    note(f"test it: {made.check}")
    note(f"run it:  {made.run}")
