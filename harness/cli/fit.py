"""`harness fit`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.groups import together
from harness.cli.inputs import Cases, Room
from harness.cli.options import GpuMemoryOption, GpuOption, MemoryOption, PredictOnlyOption, ResultsOption
from harness.cli.screen import note, out, show
from harness.contract import plugins
from harness.machine.environment import cache_folder
from harness.report.fit import text
from harness.suite.of_model import LEAST_TOKENS, USUAL_TOKENS
from harness.suite.units import size
from harness.verbs.fit import Search, run


@together
def command(
    over: Annotated[str, typer.Option(help="The size to make as large as it goes: tokens, batch, ...")],
    cases: Cases,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="What a case may take: 8GiB; several times if wanted. By default the suite's or all memory."),
    ] = None,
    memory: MemoryOption = None,
    gpu_memory: GpuMemoryOption = None,
    card: GpuOption = None,
    predict_only: PredictOnlyOption = False,
    results: ResultsOption = Path("results"),
) -> None:
    """Find the longest value of one size that fits a budget, for the baseline and each strategy.

    Predicted first, then run in fresh processes that may not take more: the largest that passed and the smallest that
    failed.
    """
    loaded = plugins.load(cases.plugins)
    room = Room(memory=memory, gpu_memory=gpu_memory, card=card)
    plan = cases.plan(loaded, on_gpu=room.on_gpu, usual_tokens=LEAST_TOKENS if over == "tokens" else USUAL_TOKENS)
    if cases.model is not None:
        out.print(f"The search begins with the {over} of this suite.\n")
    machine = room.machine(() if predict_only else plan.places)  # rates are for what is run
    predict_only = predict_only or all(machine.is_absent(place) for place in plan.places)
    search = Search(plan, loaded, cases.plugins, over, cache_folder(), note, machine)
    budgets: list[int | None] = [size(each, "budget") for each in budget] if budget else [None]
    file, records = run(search, budgets, results, predict_only)
    show(text(records))
    note(f"records: {file}")
