"""The verbs."""

import signal
import sys
from collections.abc import Callable, Collection
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli.progress import Watcher, counted
from harness.contract import plugins
from harness.machine import facts
from harness.machine.checkups import keep
from harness.records import store
from harness.report import advise as advice
from harness.report import charts, insert, table
from harness.report import check as findings
from harness.report import compare as changed
from harness.report import doctor as checkups
from harness.report import plan as foresight
from harness.report.fit import fits
from harness.report.report import Report
from harness.report.results import Results, read
from harness.run import cluster, session
from harness.suite import reader, schema
from harness.suite.plan import Plan, selected
from harness.suite.units import SizeError, size
from harness.verbs import advise as advising
from harness.verbs import check as contract
from harness.verbs import compare as changes
from harness.verbs import doctor
from harness.verbs import fit as limits
from harness.verbs.plan import Machine, of_plan, remedies, this_machine, with_budget
from harness.verdicts import claims, documents, judge

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

REFUSALS = (
    schema.SuiteError,
    plugins.PluginError,
    store.StoreError,
    insert.InsertError,
    claims.ClaimError,
    changes.ConditionError,
    charts.PicturesError,
    SizeError,
    cluster.ClusterError,
)
REFUSED, INTERRUPTED = 2, 130


@app.command()
def run(
    path: SuiteArgument,
    results: Annotated[Path, typer.Option(help="The folder for results.")] = Path("results"),
    place: Annotated[list[str] | None, typer.Option("--place", help="Run only these places.")] = None,
    only: Annotated[str | None, typer.Option("-k", help="Run only strategies whose name contains this.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Time rounds, in place of the suite's.", min=0, max=100)] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of resuming.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Measure nothing that this code has measured.")] = False,
    max_bytes: Annotated[int | None, typer.Option(help="Skip cases predicted to need more than this.", min=1)] = None,
    try_all: Annotated[
        bool, typer.Option("--try-all", help="Run cases that are predicted to exceed the machine's memory as well.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ADDRESS", help="Run on Dask workers: tcp://host:8786, or local:2 for two here."
        ),
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Measure every case of a suite and print the tables. Run it again to resume after an interruption."""
    loaded = plugins.load(tuple(plugin or ()))
    plan = selected(reader.read(path, loaded), place, only)
    options = session.Options(results, tuple(plugin or ()), rounds, fresh, max_bytes, try_all, once=once)
    folder = results / plan.name / facts.name()
    show = _titled(plan.suite.title or plan.name)
    with Watcher(err, loaded, show) as watcher:
        try:
            if address is None:
                written = session.run(plan, loaded, options, watcher)
            else:
                written = cluster.run(address, plan, loaded, options, watcher)
        except KeyboardInterrupt:
            for each in _read(sorted(folder.glob("*.jsonl"))[-1:], loaded) if folder.is_dir() else []:
                _print_tables(each, loaded, watcher.printed, show)
            raise
    for each in _read([written], loaded):
        _print_tables(each, loaded, watcher.printed, show)
        if each.answers:
            out.print(f"## Claims\n\n{table.claimed(each.answers)}\n")
        err.print(f"records: {written}")
        out.print(table.last_lines(each.tables))


def _titled(title: str) -> Callable[[str], None]:
    """Return a function that prints text, the first under a title."""
    titles = iter([f"# {table.escaped(title)}\n"])

    def show(text: str) -> None:
        for line in titles:
            out.print(line)
        out.print(text)

    return show


def _print_tables(
    results: Results, loaded: plugins.Plugins, printed: Collection[str], show: Callable[[str], None]
) -> None:
    """Print the tables that were not printed as they came."""
    tables = [each for each in results.tables if each.case.group not in printed]
    if tables:
        show(table.markdown(tables, table.tokens_per_step(tables, loaded)))


PlaceOption = Annotated[list[str] | None, typer.Option("--place", help="Only these places.")]
OnlyOption = Annotated[str | None, typer.Option("-k", help="Only strategies whose name contains this.")]
MemoryOption = Annotated[str | None, typer.Option(help="The memory of the machine, in place of this one's: 16GiB.")]
GpuMemoryOption = Annotated[str | None, typer.Option(help="The memory of the GPU, in place of this one's: 80GiB.")]


@app.command()
def plan(
    path: SuiteArgument,
    budget: Annotated[str | None, typer.Option(help="What each case may take, in place of the suite's: 8GiB.")] = None,
    memory: MemoryOption = None,
    gpu_memory: GpuMemoryOption = None,
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Predict every case of a suite without running any: its peak, whether it fits, the time of a step."""
    names, loaded = tuple(plugin or ()), plugins.load(tuple(plugin or ()))
    chosen = selected(reader.read(path, loaded), place, only)
    chosen = with_budget(chosen, size(budget) if budget else None)
    machine = _machine(chosen, memory, gpu_memory)
    with counted(err, "predicted", len(chosen.cases)) as tell:
        groups = of_plan(chosen, loaded, names, machine, lambda case: tell())
    helps = [remedies(rows, chosen, loaded, names, machine) for rows in groups]
    out.print(foresight.plan(groups, helps), end="")


@app.command()
def fit(
    path: SuiteArgument,
    over: Annotated[str, typer.Option(help="The size to make as large as it goes: tokens, batch, ...")],
    budget: Annotated[list[str], typer.Option(help="What a case may take: 8GiB. May be given several times.")],
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Answer from predictions alone.")] = False,
    results: Annotated[Path, typer.Option(help="The folder for results.")] = Path("results"),
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Find the longest value of one size that fits a budget, for the baseline and each strategy.

    Predicted first, then run in fresh processes that may not take more: the largest that passed and the smallest that
    failed.
    """
    names, loaded = tuple(plugin or ()), plugins.load(tuple(plugin or ()))
    chosen = selected(reader.read(path, loaded), place, only)
    cache = session.cache_folder()
    known = Machine() if predict_only else this_machine(chosen.places, cache)
    search = limits.Search(chosen, loaded, names, over, cache, lambda text: err.print(text), known)
    written, rows = limits.run(search, [size(text) for text in budget], results, predict_only)
    out.print(fits(rows), end="")
    err.print(f"records: {written}")


@app.command()
def advise(
    path: SuiteArgument,
    budget: Annotated[str | None, typer.Option(help="What a case may take, in place of the suite's: 8GiB.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="An answer to allow: reordered, lower_precision or approximate."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Combine all strategies, not the suite's alone.")] = False,
    predict_only: Annotated[bool, typer.Option("--predict-only", help="Answer from predictions alone.")] = False,
    memory: MemoryOption = None,
    gpu_memory: GpuMemoryOption = None,
    results: Annotated[Path, typer.Option(help="The folder for results.")] = Path("results"),
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Say which combination of strategies to use: predict all, measure the most promising few on this machine."""
    names, loaded = tuple(plugin or ()), plugins.load(tuple(plugin or ()))
    for kind in allow or []:
        if kind not in advising.KINDS:
            raise schema.SuiteError(f"--allow: there is no answer '{kind}'{plugins.nearest(kind, advising.KINDS)}")
    chosen = selected(reader.read(path, loaded), place, only)
    chosen = with_budget(chosen, size(budget) if budget else None)
    options = session.Options(results, names)
    machine = _machine(chosen, memory, gpu_memory)
    with Watcher(err, loaded) as watcher:
        found = advising.advise(chosen, loaded, options, machine, allow or (), everything, predict_only, watcher)
    out.print(advice.text(found), end="")


def _machine(chosen: Plan, memory: str | None, gpu_memory: str | None) -> Machine:
    """Describe the machine that cases are held against: this one, with what the command line says instead."""
    here = this_machine(chosen.places, session.cache_folder())
    return Machine(
        size(memory) if memory else here.host_bytes,
        size(gpu_memory) if gpu_memory else here.device_bytes,
        here.rates,
    )


class Form(StrEnum):
    """What `report` can print."""

    markdown = auto()
    csv = auto()
    json = auto()


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Results files, or folders of them.")],
    into: Annotated[Path | None, typer.Option(help="A document to put the tables into.")] = None,
    form: Annotated[Form, typer.Option("--format", help="What to print.")] = Form.markdown,
    pictures: Annotated[Path | None, typer.Option(help="A folder to draw the charts into, as SVG and PNG.")] = None,
    only: Annotated[str | None, typer.Option("-k", help="Draw only charts whose name contains this.")] = None,
    page: Annotated[Path | None, typer.Option(help="A file for one offline HTML page of everything.")] = None,
    asked: Annotated[
        Path | None, typer.Option("--documents", help="What documents say (a YAML file): print the answers to it.")
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Print the tables of results; of a folder, the newest file of each suite and machine.

    With --into, put each suite's tables between the marks `<!-- generated: SUITE -->` and `<!-- end: SUITE -->`, and
    the answers to --documents between those of `documents`. The first mark may choose tables and rows of a suite:
    `generated: SUITE place=torch/cpu tokens=1024 rows=baseline|checkpoint`. As csv and json there is one row or object
    for each strategy, with every figure as a number.
    """
    known = documents.read(asked) if asked is not None else None
    loaded = plugins.load(tuple(plugin or ()))
    whole = Report(tuple(_read(paths, loaded)), loaded, known)
    if pictures is not None:
        for picture in whole.pictures(pictures, only or ""):
            err.print(f"picture: {picture}")
    if page is not None:
        whole.write_page(page)
        err.print(f"page: {page}")
    if into is not None:
        whole.put_into(into)
    elif pictures is None and page is None:
        told = {Form.markdown: whole.markdown, Form.csv: whole.csv, Form.json: whole.json}
        out.print(told[form](), end="")


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A results file, or a folder of them.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another of the same cases.")],
    fail_on: Annotated[
        list[str] | None, typer.Option(help="End with status 1 on this: peak>5%, time>10%, answer, status, missing.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what stayed the same as well.")] = False,
) -> None:
    """Compare two runs of the same cases, for a pull request: what became better or worse beyond the noise of both.

    Ends with status 0; with 1 where something met a condition of --fail-on; with 2 where it could not compare.
    """
    conditions = [changes.Condition.parse(each) for each in fail_on or ()]
    loaded = plugins.load()
    before, after = ([record for each in _read([path], loaded) for record in each.records] for path in (old, new))
    found = changes.compare(judge.judge(before), judge.judge(after))
    if not any(change.figure != "missing" for change in found):
        raise store.StoreError(f"'{old}' and '{new}' have no case in common: compare two runs of one suite")
    out.print(changed.text(found, changes.differences(before, after), everything), end="")
    failing = [change for change in found if any(condition.met(change) for condition in conditions)]
    if failing:
        err.print(f"harness: {len(failing)} figures became worse than --fail-on allows")
        raise typer.Exit(1)


def _read(paths: list[Path], loaded: plugins.Plugins) -> list[Results]:
    """Read the newest results below paths; tell of lines that are no records."""
    files = [file for path in paths for file in store.newest(path)]
    if not files:
        raise store.StoreError(f"there are no results in '{paths[0]}': run a suite first")
    return read(files, lambda problem: err.print(f"warning: {problem}"), loaded.aliases)


@app.command("doctor")
def doctor_(
    noise: Annotated[bool, typer.Option(help="Measure the noise between equal runs (most of the time).")] = True,
    plugin: PluginOption = None,
) -> None:
    """Check the meters on known bytes, measure this machine's noise, and list what would spoil figures."""
    loaded = plugins.load(tuple(plugin or ()))
    checkup = doctor.examine(loaded, lambda text: err.print(text), noise)
    out.print(checkups.text(checkup), end="")
    keep(checkup, session.cache_folder())
    if any(calibration.good is False for calibration in checkup.calibrations):
        raise typer.Exit(1)


@app.command()
def check(
    names: Annotated[
        list[str], typer.Argument(metavar="PLUGIN", help="A .py file, a module, or the name of an installed plugin.")
    ],
) -> None:
    """Hold plugins to their contract, in fresh processes, and say in words what is wrong. Takes a minute or more.

    Strategies: what they say of themselves, which parts they rewrite, their batches, their answers, alone and beside
    others. Workloads: their parts, batches and parameters. Instruments: what they add, and what they cost.

    Ends with status 0; with 1 where a promise is broken; with 2 where a plugin cannot be loaded.
    """
    before = set(sys.modules)
    loaded, asked, extra = plugins.named(names)
    frameworks = [name for name in contract.FRAMEWORKS if name in sys.modules and name not in before]
    found = contract.check(loaded, asked, extra, lambda text: err.print(text))
    if frameworks:
        told = f"it imports {frameworks[0]} when it is loaded: import it within the functions that need it"
        found.insert(0, contract.Finding("plugins", faults=(told,)))
    out.print(findings.text(found), end="")
    if any(finding.faults for finding in found):
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
    name = loaded.aliases.get(name, name)
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
