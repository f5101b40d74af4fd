"""`harness advise`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import completion
from harness.cli.groups import together
from harness.cli.inputs import Cases, Room, among_all
from harness.cli.options import PredictOnlyOption, ResultsOption
from harness.cli.progress import Watcher
from harness.cli.screen import err, note, out, show
from harness.contract import plugins
from harness.contract.strategy import DECLARED
from harness.report.advise import text
from harness.run import bench
from harness.suite.bounds import SuiteError
from harness.verbs.advise import advise, saved
from harness.verbs.remedies import all_too_large


@together
def command(
    cases: Cases,
    room: Room,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="An answer to allow: reordered, lower_precision or approximate.", autocompletion=completion.answers
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Combine all strategies, not only the suite's; -k chooses among them.")
    ] = False,
    predict_only: PredictOnlyOption = False,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the predictions among the results, for `harness report`.")
    ] = False,
    results: ResultsOption = Path("results"),
) -> None:
    """Choose a combination of strategies: predict all of them, and measure the most promising few on this machine."""
    loaded = plugins.load(cases.plugins)
    for kind in allow or []:
        if kind not in DECLARED:
            raise SuiteError(f"--allow: there is no answer '{kind}'{plugins.nearest(kind, DECLARED)}")
    asked = replace(cases, only=None) if everything else cases
    allowed = (*(allow or ()), *cases.answers(loaded))
    plan = asked.plan(loaded, room.budget, room.on_gpu)
    options = bench.Options(results, cases.plugins)
    machine = room.machine(plan.places)
    with Watcher(err, loaded) as watcher:
        advice = advise(
            plan,
            loaded,
            options,
            machine,
            allowed,
            everything,
            predict_only,
            watcher,
            only=cases.only,
            on_note=note,
        )
    show(text(advice, loaded.strategies))
    if not everything and any(all_too_large(each.predicted) for each in advice):
        out.print(f"\n{among_all(cases, room)}")
    if save:
        note(f"records: {saved(advice, plan, loaded, results)}")
