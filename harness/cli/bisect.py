"""`harness bisect`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import completion
from harness.cli.options import OnlyOption, PlacesOption
from harness.cli.screen import note, out
from harness.report.words import short
from harness.verbs.bisect import Attempt, BisectError, refuse_fixed, refuse_mistyped, search
from harness.verbs.compare import Condition
from harness.verdicts.times import LEAST_ROUNDS


def command(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="A suite that is here, and that both commits have.",
            autocompletion=completion.suites,
        ),
    ],
    good: Annotated[str, typer.Option(help="A commit at which it was good.")],
    bad: Annotated[str, typer.Option(help="A later one at which it is worse.")] = "HEAD",
    fail_on: Annotated[
        list[str] | None, typer.Option(help="What is worse: peak>2% (as by default), time>10%, ...")
    ] = None,
    only: OnlyOption = None,
    place: PlacesOption = None,
    plugin: Annotated[
        list[str] | None, typer.Option(help="A plugin: a .py file that both commits have, or a module.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help=f"Time rounds of each run: {LEAST_ROUNDS} or more to search for a time.", min=0)
    ] = 0,
) -> None:
    """Find the commit at which a row of a suite became worse: measure it there and at commits between, in git.

    Each commit is checked out into a folder of its own; what lies here is left alone. Commits at which the suite does
    not run, or has no case of the good commit, are skipped. Ends with status 0 where one was found, with 1 where the
    bad commit is not worse.
    """
    conditions = [Condition.parse(each) for each in fail_on or ("peak>2%",)]
    if rounds < LEAST_ROUNDS and any(condition.figure == "time" for condition in conditions):
        raise BisectError(f"--rounds {rounds}: so few show no time that is worse: give {LEAST_ROUNDS} or more")
    refuse_fixed(Path("."), plugin or ())
    refuse_mistyped(suite, place or (), only, plugin or ())
    options = ["--rounds", str(rounds), *(["-k", only] if only else [])]
    options += [word for each in place or () for word in ("--place", each)]
    options += [word for each in plugin or () for word in ("--plugin", each)]
    first = search(Path("."), suite, good, bad, conditions, options, _log)
    if first is None:
        note(f"'{bad}' is no worse than '{good}'")
        raise typer.Exit(1)
    out.print(f"{first.commit} is the first that is worse{_or_before(first)}: {first.why}")


def _or_before(first: Attempt) -> str:
    """Say that it may be a commit before it, where those could not be measured."""
    if not first.unmeasured:
        return ""
    which = "the one" if first.unmeasured == 1 else f"one of the {first.unmeasured}"
    return f", or {which} before it that could not be measured"


def _log(tried: Attempt) -> None:
    word = {True: "worse", False: "good", None: "skipped"}[tried.worse]
    note(f"{short(tried.commit)} {word}{f': {tried.why}' if tried.why else ''}")
