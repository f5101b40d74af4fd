"""`harness run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import signals
from harness.cli.groups import together
from harness.cli.inputs import Cases, results_of
from harness.cli.options import ResultsOption
from harness.cli.progress import Watcher
from harness.cli.screen import err, note, out, show
from harness.contract import plugins
from harness.machine import facts
from harness.report import answer, table
from harness.report.results import Results
from harness.report.text import escaped
from harness.run import bench, cluster, predict_again, session
from harness.suite.bounds import MAX_ROUNDS, SuiteError
from harness.suite.units import size


@together
def command(
    cases: Cases,
    results: ResultsOption = Path("results"),
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds of timing, in place of the suite's; 0: memory and answers alone.", min=0, max=MAX_ROUNDS
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of resuming.")] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Measure only what is missing, or whose code has changed since; -k and --place begin another run.",
        ),
    ] = False,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Skip cases predicted to need more than this: 8GiB.")
    ] = None,
    try_all: Annotated[
        bool, typer.Option("--try-all", help="Run cases that are predicted to exceed the machine's memory as well.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ADDRESS", help="Run on Dask workers: tcp://host:8786, or local:2 for two here."
        ),
    ] = None,
) -> None:
    """Measure every case of a suite and print the tables. Run it again to resume after an interruption."""
    if fresh and once:
        raise SuiteError("--fresh begins anew, and --once keeps what is there: give one of the two")
    loaded = plugins.load(cases.plugins)
    plan = cases.plan(loaded, rounds=rounds)
    most = None if max_bytes is None else size(max_bytes, "--max-bytes")
    options = bench.Options(results, cases.plugins, rounds, fresh, most, try_all, once=once)
    folder = results / plan.name / facts.name()
    before = _sizes(folder)
    titled = _titled(plan.suite.title or plan.name)
    with Watcher(err, loaded, titled) as watcher:
        try:
            with signals.undisguised():
                if address is None:
                    again = predict_again.run(plan, loaded, options, watcher) if once else None
                    file = again or session.run(plan, loaded, options, watcher)
                else:
                    file = cluster.run(address, plan, loaded, options, watcher)
        except KeyboardInterrupt:
            written = [file for file, size in _sizes(folder).items() if size != before.get(file)]
            for each in results_of(written, loaded) if written else []:
                _show_rest(each, loaded, watcher, titled)
            raise
    for each in results_of([file], loaded):
        _show_rest(each, loaded, watcher, titled)
        if each.answers:
            titled(f"## Claims\n\n{table.claimed(each.answers)}\n")
        note(f"records: {file}")
        show(answer.last_lines(each.tables, loaded.strategies), end="\n")


def _sizes(folder: Path) -> dict[Path, int]:
    """Return the size of each results file of a folder, in bytes; links that lead nowhere are none."""
    return {file: file.stat().st_size for file in folder.glob("*.jsonl") if file.exists()}


def _titled(title: str) -> Callable[[str], None]:
    """Return a function that prints text, the first under a title.

    On a terminal it goes where the bar is, which then moves below: else it would begin within the line of the bar.
    """
    titles = iter([f"# {escaped(title)}\n"])

    def titled(text: str) -> None:
        screen = err if out.file.isatty() and err.file.isatty() else out
        for line in (*titles, text):
            show(line, end="\n", screen=screen)

    return titled


def _show_rest(results: Results, loaded: plugins.Plugins, watcher: Watcher, show: Callable[[str], None]) -> None:
    """Print the tables that were not printed as they came."""
    tables = [each for each in results.tables if each.case.comparison_key not in watcher.printed]
    if tables:
        show(table.markdown(tables, loaded, title_of=watcher.title_of))
