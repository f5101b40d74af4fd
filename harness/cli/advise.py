"""`harness advise`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.inputs import machine_of, model_of, plan_of
from harness.cli.options import (
    BatchOption,
    BudgetOption,
    GpuMemoryOption,
    GpuOption,
    MemoryOption,
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
from harness.cli.progress import Watcher
from harness.cli.screen import err, note, out
from harness.contract import plugins
from harness.report.advise import text
from harness.run import session
from harness.suite.schema import SuiteError
from harness.verbs.advise import KINDS, advise, saved


def command(
    path: SuiteArgument = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    batch: BatchOption = None,
    rows: WithOption = None,
    budget: BudgetOption = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="An answer to allow: reordered, lower_precision or approximate."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Combine all strategies, not only the suite's.")] = False,
    predict_only: PredictOnlyOption = False,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the predictions among the results, for `harness report`.")
    ] = False,
    memory: MemoryOption = None,
    gpu_memory: GpuMemoryOption = None,
    card: GpuOption = None,
    results: ResultsOption = Path("results"),
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
) -> None:
    """Choose a combination of strategies: predict all of them, and measure the most promising few on this machine."""
    names = tuple(plugin or ())
    loaded = plugins.load(names)
    for kind in allow or []:
        if kind not in KINDS:
            raise SuiteError(f"--allow: there is no answer '{kind}'{plugins.nearest(kind, KINDS)}")
    on_gpu = gpu_memory is not None or card is not None
    plan = plan_of(path, model_of(model, tokens, batch, rows), loaded, place, only, budget, on_gpu)
    options = session.Options(results, names)
    machine = machine_of(plan, memory, gpu_memory, card)
    with Watcher(err, loaded) as watcher:
        advice = advise(plan, loaded, options, machine, allow or (), everything, predict_only, watcher)
    out.print(text(advice), end="")
    if save:
        note(f"records: {saved(advice, plan, loaded, results)}")
