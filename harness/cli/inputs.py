"""What the arguments and options of several verbs mean: a plan, a machine, results."""

from pathlib import Path

from harness.cli.screen import note
from harness.contract.plugins import Plugins
from harness.records import store
from harness.report.results import Results, read
from harness.run import session
from harness.suite import reader
from harness.suite.plan import Plan, selected
from harness.suite.units import size
from harness.verbs.plan import Machine, this_machine, with_budget


def plan_of(path: Path, loaded: Plugins, place: list[str] | None, only: str | None, budget: str | None = None) -> Plan:
    """Read a suite and keep the rows that the options choose, each within the budget if one is given."""
    return with_budget(selected(reader.read(path, loaded), place, only), size(budget) if budget else None)


def machine_of(plan: Plan, memory: str | None, gpu_memory: str | None) -> Machine:
    """Return the machine that cases must fit: this one, but for what the options replace."""
    here = this_machine(plan.places, session.cache_folder())
    return Machine(
        size(memory) if memory else here.host_bytes,
        size(gpu_memory) if gpu_memory else here.device_bytes,
        here.rates,
        here.cache,
    )


def results_of(paths: list[Path], loaded: Plugins, suites: Path | None = None) -> list[Results]:
    """Read the newest results below each path, with the claims of `suites`, and warn of lines that are no records."""
    files = [file for path in paths for file in store.newest(path)]
    if not files:
        raise store.StoreError(f"there are no results in '{paths[0]}': run a suite first")
    return read(files, lambda problem: note(f"warning: {problem}"), loaded.aliases, suites)
