"""The command line: every verb, and how it ends. A verb is imported when it is called: `--help` waits for none."""

import ast
import errno
import importlib
import importlib.util
import io
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import harness
from harness.cli import signals
from harness.cli.screen import err, out
from harness.refusal import Refusal

VERBS = {
    "run": "harness.cli.run:command",
    "plan": "harness.cli.plan:command",
    "fit": "harness.cli.fit:command",
    "advise": "harness.cli.advise:command",
    "report": "harness.cli.report:command",
    "compare": "harness.cli.compare:command",
    "history": "harness.cli.history:command",
    "bisect": "harness.cli.bisect:command",
    "doctor": "harness.cli.doctor:command",
    "new": "harness.cli.new:command",
    "check": "harness.cli.check:command",
    "list": "harness.cli.catalogue:list_all",
    "show": "harness.cli.catalogue:show",
}
"""The function of each verb: its module and its name."""
REFUSED = 2
"""The status of a refusal."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What is wrong where nothing more can be written; where results are, their store says it in other words."""
UNUSABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""What is wrong with a path that a user has named, where nothing says it in other words."""


def _missing(match: re.Match[str]) -> str:
    choices = match[2].strip() if match[2] else ""
    return f"give {match[1]}: {choices}" if choices else f"give {match[1]}: --help says what it is"


WORDS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"^Invalid value for '?([^:']+)'?: ": r"\1: ",
    r"Input should be a valid integer.*": "give a whole number",
    r"Input should be a valid number.*": "give a number",
    r"Input should be greater than or equal to (\S+)$": r"give at least \1",
    r"Input should be less than or equal to (\S+)$": r"give at most \1",
    r"^No such command (.+?)\.?$": r"there is no verb \1: `harness --help` lists them",
    r"^No such option: (\S+)": r"there is no option \1",
    r"^Missing (?:argument|option) '([^']+)'\.?(?: Choose from:\s*([^\n]+))?[\s\S]*": _missing,
    r"^Got unexpected extra arguments?(?:\(s\))? \((.*)\)$": r"there are words too many: \1",
    r"^Option '?(--[\w-]+)'? requires an argument.*": r"\1 needs a value",
    r" \(Possible options: ([^)]*)\)": r"; did you mean \1?",
    r"is not one of ('[^',]+')\.?$": r"is not \1, the only choice",
    r"(Value error, |\.$)": "",
}
"""What the library of options says of a value, and what we say."""


class Verbs(TyperGroup):
    """The verbs as commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in their order."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a verb; None where there is none of that name."""
        if cmd_name not in VERBS:
            return None
        module, _, function = VERBS[cmd_name].partition(":")
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        alone.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each verb without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(place)) for name, place in VERBS.items()])


def _summary(place: str) -> str:
    """Read the first line of a function's docstring from its source."""
    module, _, function = place.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    command = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return (ast.get_docstring(command) or "").partition("\n")[0]


app = typer.Typer(
    cls=Verbs, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"harness {harness.__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Compare memory strategies: what each costs, what it saves, and whether the answer is still right."""


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence and status 2, Ctrl-C with 130."""
    signals.listen()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a letter that the terminal lacks becomes its number
    try:
        with signals.undisguised():
            code = app(standalone_mode=False)
        if code == signals.INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except Refusal as error:
        err.print(f"harness: {error}")
        sys.exit(REFUSED)
    except OSError as error:
        if error.errno in FULL:
            what = error.filename or "a file, or what it prints,"
            err.print(f"harness: {what} cannot be written ({error.strerror}): free some space")
            with suppress(OSError):
                sys.stdout.close()  # or Python says at its end that it could not write the rest
            sys.exit(REFUSED)
        if error.filename is None or error.errno not in UNUSABLE:
            raise
        err.print(f"harness: {str(error.filename)!r} cannot be used ({error.strerror}): name another path")
        sys.exit(REFUSED)
    except (typer.Exit, typer.Abort) as stop:
        sys.exit(getattr(stop, "exit_code", 1))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it changes nothing
        err.print(_interrupted(sys.argv[1:]))
        sys.exit(signals.INTERRUPTED)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "format_message"):
            said = error.format_message()  # without any verb it is the help
            err.print(said if said.startswith("Usage:") else f"harness: {_plain(said)}")
            sys.exit(REFUSED)
        raise


def _plain(said: str) -> str:
    """Return what the library of options says of a value, in the words of all other refusals."""
    for pattern, words in WORDS.items():
        said = re.sub(pattern, words, said)
    return said


def _interrupted(words: Sequence[str]) -> str:
    """Return what to say of a command that was interrupted: `run` resumes, and the other verbs begin anew."""
    if words[:1] != ["run"]:
        return "interrupted"
    same = "the same command without --fresh" if "--fresh" in words else "the same command"
    return f"interrupted: what is measured is kept; {same} resumes"


if __name__ == "__main__":
    main()
