"""The command line: every verb, and how it ends."""

import signal
import sys
from collections.abc import Callable

import typer

from harness.cli import advise, catalogue, check, compare, doctor, fit, plan, report, run
from harness.cli.screen import err
from harness.contract.plugins import PluginError
from harness.records.store import StoreError
from harness.report.charts import PicturesError
from harness.report.insert import InsertError
from harness.run.cluster_worker import ClusterError
from harness.suite.schema import SuiteError
from harness.suite.units import SizeError
from harness.verbs.compare import ConditionError
from harness.verdicts.expressions import ClaimError

VERBS: dict[str, Callable[..., None]] = {
    "run": run.command,
    "plan": plan.command,
    "fit": fit.command,
    "advise": advise.command,
    "report": report.command,
    "compare": compare.command,
    "doctor": doctor.command,
    "check": check.command,
    "list": catalogue.list_all,
    "show": catalogue.show,
}
REFUSALS = (
    SuiteError, SizeError, PluginError, StoreError, ClusterError, ConditionError, ClaimError, InsertError,
    PicturesError,
)  # fmt: skip
REFUSED, INTERRUPTED = 2, 130

app = typer.Typer(
    help="Compare memory strategies: what each costs, what it saves, and whether the answer is still right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _command in VERBS.items():
    app.command(_name)(_command)


def run_app() -> object:
    """Run the command; a signal that came while a lock was taken, and ended as an error of the lock, is one again."""
    try:
        return app(standalone_mode=False)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt | SystemExit):
            cause = cause.__context__
        raise (cause or error) from None


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence and status 2, Ctrl-C with 130."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # the second is the terminal that was closed
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    try:
        code = run_app()
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except REFUSALS as error:
        err.print(f"harness: {error}")
        sys.exit(REFUSED)
    except (typer.Exit, typer.Abort) as stop:
        sys.exit(getattr(stop, "exit_code", 1))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it changes nothing
        err.print("interrupted: what is measured is kept; the same command resumes")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "format_message"):
            err.print(f"harness: {error.format_message()}")
            sys.exit(REFUSED)
        raise


if __name__ == "__main__":
    main()
