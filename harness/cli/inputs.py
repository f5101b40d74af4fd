"""What the arguments and options of several verbs mean: a plan, a machine, results."""

from collections.abc import Sequence
from pathlib import Path

from harness.backends.cards import CARDS
from harness.cli.screen import note, out
from harness.contract.plugins import Plugins, nearest, printable
from harness.machine import gpu
from harness.records import store
from harness.refusal import Refusal
from harness.report.results import Results, read
from harness.run import session
from harness.suite import reader, shipped
from harness.suite.of_model import Model
from harness.suite.plan import Plan, selected
from harness.suite.schema import SuiteError
from harness.suite.units import size
from harness.verbs.plan import Machine, this_machine, with_budget


def model_of(name: str | None, tokens: int | None, batch: int | None, rows: Sequence[str] | None) -> Model | None:
    """Return the model that the options name; None where there is none. Raises SuiteError for options without one."""
    if name is not None:
        return Model(name, tokens, batch, tuple(rows or ()))
    for option, value in (("--tokens", tokens), ("--batch", batch), ("--with", rows)):
        if value:
            raise SuiteError(f"{option} goes with --model: a suite says it itself")
    return None


def plan_of(
    path: Path | None,
    model: Model | None,
    loaded: Plugins,
    place: list[str] | None,
    only: str | None,
    budget: str | None = None,
    on_gpu: bool = False,
) -> Plan:
    """Read a suite, or write and show that of a model, and keep the rows that the options choose.

    Each case has the budget if one is given. A model is for a GPU where there is one, or `on_gpu` says so.
    """
    if (path is None) == (model is None):
        raise SuiteError("name either a SUITE, which is a YAML file, or a model: --model NAME")
    if path is not None:
        plan = reader.read(shipped.suite(path), loaded)
    else:
        assert model is not None
        on_gpu = on_gpu or gpu.usable_bytes() is not None
        text = model.suite(place or ["torch/cuda" if on_gpu else "torch/cpu"])
        out.print(f"```yaml\n{text}```\n")
        plan = reader.read(Path(f"{model.stem}.yaml"), loaded, text)
    return with_budget(selected(plan, place, only), size(budget) if budget else None)


def machine_of(plan: Plan, memory: str | None, gpu_memory: str | None, card: str | None) -> Machine:
    """Return the machine that cases must fit: this one, but for what the options replace; refuse an unknown card."""
    if card and card not in CARDS:
        raise Refusal(f"--gpu: there is no card '{printable(card)[:40]}'{nearest(card, CARDS)}")
    here = this_machine(plan.places, session.cache_folder())
    of_card = CARDS[card].memory_bytes if card else here.device_bytes
    return Machine(
        size(memory) if memory else here.host_bytes,
        size(gpu_memory) if gpu_memory else of_card,
        here.rates,
        here.cache,
        card or here.card,
    )


def results_of(paths: list[Path], loaded: Plugins, suites: Path | None = None) -> list[Results]:
    """Read the newest results below each path, with the claims of `suites`, and warn of lines that are no records."""
    files = [file for path in paths for file in store.newest(path)]
    if not files:
        raise store.StoreError(f"there are no results in '{paths[0]}': run a suite first")
    return read(files, lambda problem: note(f"warning: {problem}"), loaded.aliases, suites)
