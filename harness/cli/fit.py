"""`harness fit`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.inputs import model_of, plan_of
from harness.cli.options import (
    BatchOption,
    ModelOption,
    OnlyOption,
    PlaceOption,
    PluginOption,
    PredictOnlyOption,
    ResultsOption,
    SuiteArgument,
    TokensOption,
    WithOption,
)
from harness.cli.screen import note, out
from harness.contract import plugins
from harness.report.fit import text
from harness.run import session
from harness.suite.units import size
from harness.verbs.fit import Search, of_this_machine, run
from harness.verbs.plan import Machine, this_machine


def command(
    over: Annotated[str, typer.Option(help="The size to make as large as it goes: tokens, batch, ...")],
    budget: Annotated[
        list[str] | None,
        typer.Option(help="What a case may take: 8GiB; several times if wanted. By default the memory there is."),
    ] = None,
    path: SuiteArgument = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    batch: BatchOption = None,
    rows: WithOption = None,
    predict_only: PredictOnlyOption = False,
    results: ResultsOption = Path("results"),
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Find the longest value of one size that fits a budget, for the baseline and each strategy.

    Predicted first, then run in fresh processes that may not take more: the largest that passed and the smallest that
    failed.
    """
    names = tuple(plugin or ())
    loaded = plugins.load(names)
    plan = plan_of(path, model_of(model, tokens, batch, rows), loaded, place, only)
    cache = session.cache_folder()
    machine = Machine() if predict_only else this_machine(plan.places, cache)
    search = Search(plan, loaded, names, over, cache, note, machine)
    budgets = [size(each) for each in budget or ()] or [of_this_machine(plan.places)]
    file, found = run(search, budgets, results, predict_only)
    out.print(text(found), end="")
    note(f"records: {file}")
