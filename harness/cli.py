"""The verbs."""

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness import campaign, judge, plugins, records, suite
from harness import doctor as hospital
from harness.assembly import shape_of
from harness.records import Case, Record
from harness.report import checkups, insert, table

app = typer.Typer(
    help="Compare memory strategies: what each costs, what it saves, and whether the answer is still right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False, markup=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

PluginOption = Annotated[list[str] | None, typer.Option("--plugin", help="A plugin: a .py file or a module.")]
SuiteArgument = Annotated[Path, typer.Argument(metavar="SUITE", help="A suite: a YAML file.")]

REFUSALS = (suite.SuiteError, plugins.PluginError, records.StoreError, insert.InsertError)
REFUSED, INTERRUPTED = 2, 130


@app.command()
def run(
    path: SuiteArgument,
    results: Annotated[Path, typer.Option(help="The folder for results.")] = Path("results"),
    place: Annotated[list[str] | None, typer.Option("--place", help="Run only these places.")] = None,
    only: Annotated[str | None, typer.Option("-k", help="Run only strategies whose name contains this.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Time rounds, in place of the suite's.", min=0, max=100)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of resuming.")] = False,
    max_bytes: Annotated[int | None, typer.Option(help="Skip cases predicted to need more than this.", min=1)] = None,
    plugin: PluginOption = None,
) -> None:
    """Measure every case of a suite and print the tables. Run it again to resume after an interruption."""
    loaded = plugins.load(tuple(plugin or ()))
    plan = suite.selected(suite.read(path, loaded), place, only)
    options = campaign.Options(results, tuple(plugin or ()), rounds, fresh, max_bytes)
    with _Watcher() as watcher:
        written = campaign.run(plan, loaded, options, watcher)
    out.print(_tables(written, loaded, plan.suite.title), end="")
    err.print(f"records: {written}")


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Results files, or folders of them.")],
    into: Annotated[Path | None, typer.Option(help="A document to put the tables into.")] = None,
    plugin: PluginOption = None,
) -> None:
    """Print the tables of results as markdown; of a folder, the newest file of each suite and machine.

    With --into, put each suite's tables between the marks `<!-- generated: SUITE -->` and `<!-- end: SUITE -->`.
    """
    loaded = plugins.load(tuple(plugin or ()))
    files = [file for path in paths for file in records.newest(path)]
    if not files:
        raise records.StoreError(f"there are no results in '{paths[0]}': run a suite first")
    if into is None:
        for file in files:
            out.print(_tables(file, loaded), end="")
        return
    for file in files:
        suite_name = file.parent.parent.name
        if insert.has_place(into, suite_name):
            insert.insert_into(into, suite_name, _tables(file, loaded, headed=False))


@app.command()
def doctor(
    noise: Annotated[bool, typer.Option(help="Measure the noise between equal runs (most of the time).")] = True,
    plugin: PluginOption = None,
) -> None:
    """Check the meters on known bytes, measure this machine's noise, and list what would spoil figures."""
    loaded = plugins.load(tuple(plugin or ()))
    checkup = hospital.examine(loaded, lambda text: err.print(text), noise)
    out.print(checkups.text(checkup), end="")
    hospital.keep(checkup, campaign.cache_folder())
    if any(calibration.good is False for calibration in checkup.calibrations):
        raise typer.Exit(1)


@app.command("list")
def list_(plugin: PluginOption = None) -> None:
    """List the strategies by the part they rewrite, and the workloads."""
    loaded = plugins.load(tuple(plugin or ()))
    by_part: dict[str, list[str]] = {}
    for strategy in loaded.strategies.values():
        part = strategy.rewrites[0] if strategy.rewrites else "(none)"
        by_part.setdefault(part, []).append(f"  {strategy.name:<16} {strategy.summary}")
    for part, lines in by_part.items():
        out.print(f"{part}\n" + "\n".join(lines))
    out.print("workloads")
    for workload in loaded.workloads.values():
        out.print(f"  {workload.name:<16} presets: {', '.join(workload.presets)}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A strategy or a workload.")], plugin: PluginOption = None) -> None:
    """Show what a strategy keeps and pays, its knobs and where it runs; or a workload's sizes."""
    loaded = plugins.load(tuple(plugin or ()))
    if name in loaded.strategies:
        strategy = loaded.strategies[name]
        out.print(f"{name}: {strategy.about.strip()}\n")
        out.print(f"rewrites: {', '.join(strategy.rewrites) or 'nothing'}\nbackends: {', '.join(strategy.on)}")
        for knob in strategy.knobs.values():
            out.print(f"knob {knob.name}: {knob.type.__name__}, default {str(knob.default).lower()}")
    elif name in loaded.workloads:
        workload = loaded.workloads[name]
        out.print(f"{name}: {workload.about.strip()}\n")
        for field, info in workload.shape.model_fields.items():  # type: ignore[attr-defined]
            out.print(f"{field}: default {info.default}{'; ' + info.description if info.description else ''}")
        for preset, values in workload.presets.items():
            out.print(f"preset {preset}: {', '.join(f'{key}={value}' for key, value in values.items())}")
    else:
        known = [*loaded.strategies, *loaded.workloads]
        raise plugins.PluginError(f"there is no strategy or workload '{name}'{plugins.nearest(name, known)}")


def _tables(file: Path, loaded: plugins.Plugins, title: str | None = None, headed: bool = True) -> str:
    found, problems = records.read(file)
    for problem in problems:
        err.print(f"warning: {problem}")
    tables = judge.judge(found)
    tokens = {each.case.group: _tokens(each.case, loaded) for each in tables}
    name = title or next((record.suite for record in found), file.stem)
    return table.markdown(tables, {k: v for k, v in tokens.items() if v}, name if headed else "")


def _tokens(case: Case, loaded: plugins.Plugins) -> int | None:
    """Give the tokens of a step; None for a record of a workload that is not, or no longer, such a one."""
    workload = loaded.workloads.get(case.workload)
    try:
        return None if workload is None else workload.tokens_per_step(shape_of(loaded, case))
    except ValidationError:
        return None


class _Watcher(campaign.Progress):
    """Show how far a run is: a bar on a terminal, a line for each task elsewhere."""

    def __init__(self) -> None:
        self.live = err.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=err,
            disable=not self.live,
        )
        self.started = time.monotonic()
        self.total = self.done = self.resumed = 0

    def __enter__(self) -> "_Watcher":
        self.bar.start()
        self.id = self.bar.add_task("preparing", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def begin(self, total: int, done: int) -> None:
        self.total, self.done, self.resumed = total, done, done
        self.bar.update(self.id, total=total, completed=done)
        if done:
            err.print(f"resuming: {done} of {total} results are there")

    def start(self, task: str, case: Case) -> None:
        self.label = f"{task} {case.place} {case.label}"
        self.bar.update(self.id, description=self.label)

    def phase(self, name: str) -> None:
        self.bar.update(self.id, description=f"{self.label} [{name}]")

    def finish(self, record: Record, case: Case) -> None:
        kind = record.slot.kind if record.slot else ""
        if kind not in ("pilot", "reference"):
            self.done += 1
        self.bar.update(self.id, completed=self.done)
        if not self.live and kind != "predict":
            err.print(f"[{self.done}/{self.total}] {kind} {case.place} {case.label}: {record.status}{self._left()}")

    def _left(self) -> str:
        made = self.done - self.resumed
        if made < 1 or self.done >= self.total:
            return ""
        seconds = (time.monotonic() - self.started) / made * (self.total - self.done)
        return f", about {seconds / 60:.0f} min left"


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence and status 2, Ctrl-C with 130."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except REFUSALS as error:
        err.print(f"harness: {error}")
        sys.exit(REFUSED)
    except (typer.Exit, typer.Abort) as stop:
        sys.exit(getattr(stop, "exit_code", 1))
    except KeyboardInterrupt:
        err.print("interrupted: what is measured is kept; the same command resumes")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "format_message"):
            err.print(f"harness: {error.format_message()}")
            sys.exit(REFUSED)
        raise


if __name__ == "__main__":
    main()
