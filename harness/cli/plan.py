"""`harness plan`."""

from dataclasses import replace
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
    SuiteArgument,
    TokensOption,
    WithOption,
)
from harness.cli.progress import counted
from harness.cli.screen import err, out
from harness.contract import plugins
from harness.report.memory import explained
from harness.report.plan import text
from harness.verbs.plan import named, of_cases, of_plan, remedies


def command(
    path: SuiteArgument = None,
    model: ModelOption = None,
    tokens: TokensOption = None,
    batch: BatchOption = None,
    rows: WithOption = None,
    budget: BudgetOption = None,
    memory: MemoryOption = None,
    gpu_memory: GpuMemoryOption = None,
    card: GpuOption = None,
    place: PlaceOption = None,
    only: OnlyOption = None,
    plugin: PluginOption = None,
    explain: Annotated[str | None, typer.Option(help="A case, as the table names it: what stands at its peak.")] = None,
) -> None:
    """Predict every case of a suite without running any: its peak, whether it fits, the time of a step."""
    names = tuple(plugin or ())
    loaded = plugins.load(names)
    on_gpu = gpu_memory is not None or card is not None
    plan = plan_of(path, model_of(model, tokens, batch, rows), loaded, place, only, budget, on_gpu)
    machine = machine_of(plan, memory, gpu_memory, card)
    if explain is not None:
        machine = replace(machine, cache=None)
        out.print(explained(of_cases(named(plan.cases, explain), plan, loaded, names, machine)), end="")
        return
    with counted(err, "predicted", len(plan.cases)) as count_one:
        comparisons = of_plan(plan, loaded, names, machine, lambda case: count_one())
    out.print(text(comparisons, [remedies(rows, plan, loaded, names, machine) for rows in comparisons]), end="")
