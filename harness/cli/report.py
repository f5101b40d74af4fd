"""`harness report`."""

from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.inputs import results_of
from harness.cli.options import PluginOption
from harness.cli.screen import note, out, show
from harness.contract import plugins
from harness.records import store
from harness.refusal import Refusal
from harness.report.report import Report
from harness.verdicts import documents


class Form(StrEnum):
    """What `report` can print."""

    markdown = auto()
    csv = auto()
    json = auto()
    bencher = auto()
    benchmark_action = auto()


def command(
    paths: Annotated[list[Path], typer.Argument(metavar="RESULTS", help="Results files, or folders of them.")],
    into: Annotated[list[Path] | None, typer.Option(help="A document to put the tables into; several times.")] = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="What to print.", show_default="markdown, if nothing is written")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="A folder to draw the charts into, as SVG and PNG.")] = None,
    only: Annotated[
        str | None, typer.Option("-k", help="Draw only charts whose name contains this, with --pictures.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="A file for one offline HTML page of everything.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="A file for every figure of every row, as parquet.")] = None,
    sentences: Annotated[
        Path | None,
        typer.Option("--documents", help="A YAML file of sentences to test: print what was measured of each."),
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Print the tables of results; of a folder, the newest file of each suite and machine.

    With --documents the claims are those of the suites beside that file, as they stand now; else those that a run was
    made for.

    With --into, put each suite's tables between the marks `<!-- generated: SUITE -->` and `<!-- end: SUITE -->`,
    and the answers to --documents between those of `documents`; with --pictures as well, draw those that the
    documents link to. The marks `use`, `advice`, `trust`, `sentences` and `suites` are what a first page needs;
    `counterparts` is how to ask other libraries for each strategy. The first mark may choose tables and rows of a
    suite: `generated: SUITE place=torch/cpu tokens=1024 rows=baseline|checkpoint`. As csv and json there is one row or
    object for each strategy, with every figure as a number. Where something is written to a file, nothing is printed
    but what --format asks for.
    """
    if only is not None and pictures is None:
        raise Refusal("-k chooses among the charts to draw: give --pictures FOLDER as well")
    if sentences is not None and form not in (None, Form.markdown) and not (into or page):
        raise Refusal(f"--documents has no rows as {form.value}: leave out --format, or give --page or --into as well")
    letter = documents.read(sentences) if sentences is not None else None
    loaded = plugins.load(tuple(plugin or ()))
    suites = sentences.parent if sentences is not None else None
    whole = Report(tuple(results_of(paths, loaded, suites)), loaded, letter)
    if pictures is not None:
        drawn = False
        for picture in whole.pictures(pictures, only or "", into or ()):
            drawn = True
            note(f"picture: {picture}")
        if not (drawn or into):
            note("note: nothing to draw: a picture needs two timed rows, two lengths, or the phases of a peak")
    if page is not None:
        whole.write_page(page)
        note(f"page: {page}")
    if (parquet is not None or form not in (None, Form.markdown)) and not whole.figures:
        raise store.StoreError("these results have no rows, as limits and advice have none: print them as markdown")
    if parquet is not None:
        whole.write_parquet(parquet)
        note(f"parquet: {parquet}")
    for document in into or ():
        if others := whole.put_into(document):
            note(f"note: '{document}': nothing here is named {', '.join(map(repr, others))}; what stands there stays")
    if form is not None or not (into or pictures or page or parquet):
        if not any(each.records for each in whole.results):
            raise store.StoreError(f"there is no record in '{paths[0]}': name results that `harness run` wrote")
        _print(whole, form or Form.markdown)


def _print(whole: Report, form: Form) -> None:
    """Print a report in a form."""
    text_of = {
        Form.markdown: whole.markdown,
        Form.csv: whole.csv,
        Form.json: whole.json,
        Form.bencher: whole.bencher,
        Form.benchmark_action: whole.benchmark_action,
    }
    text = text_of[form]()
    if form in (Form.json, Form.bencher, Form.benchmark_action):
        out.file.write(text)  # as it is: it has no control characters, and may be megabytes
        out.file.flush()
    elif form is Form.markdown:
        show(text)
    else:
        out.print(text, end="")
