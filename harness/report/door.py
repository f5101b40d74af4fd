"""The harness from Python: read results, run a suite, predict one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import warn

from harness.contract import plugins as doors
from harness.contract.plugins import Plugins
from harness.machine.environment import cache_folder
from harness.records import store
from harness.report import frame, results
from harness.report.plan import tables
from harness.report.report import Report
from harness.run import bench, session, template
from harness.suite import reader, shipped
from harness.suite.plan import Plan, demand_gpu, selected, words
from harness.suite.units import size
from harness.verbs.machine import card_of, this_machine
from harness.verbs.plan import PlanRow, of_plan, with_budget
from harness.verdicts import claims

if TYPE_CHECKING:
    from pandas import DataFrame


ARGUMENTS = {"cpu": "memory or budget", "cuda": "gpu, gpu_memory or budget"}
"""What names the memory that a case on each device may use."""


@dataclass(frozen=True)
class Predictions:
    """The predicted cases of a suite, comparison by comparison, the baseline of each first."""

    comparisons: tuple[tuple[PlanRow, ...], ...]

    def frame(self) -> "DataFrame":
        """Return one row a case: `peak_bytes`, `floor_bytes`, `fits`, `phase`, the case and its `shape.*`."""
        return frame.of_predictions(self.comparisons)

    def markdown(self) -> str:
        """Write the tables that `harness plan` prints."""
        return "\n".join(tables(self.comparisons, ARGUMENTS))


def read(*paths: str | Path, plugins: Sequence[str] = ()) -> Report:
    """Read results files or folders of them: of a folder the newest file of each suite and machine.

    Without paths it reads the results that come with the harness. Lines that are no records are left out with a
    warning. Raises StoreError where there is nothing to read, PluginError for a plugin that cannot be loaded.
    """
    loaded = doors.load(_several(plugins))
    places = [Path(path) for path in paths] or [shipped.folder("results")]
    files = [file for place in places for file in store.newest(place)]
    if not files:
        raise store.StoreError(f"there are no results in '{places[0]}': run a suite first")
    for sentence in (each for place in places for each in store.notes_of_parts(place)):
        warn(sentence, stacklevel=2)
    report = _report(files, loaded)
    if not any(each.records for each in report.results):
        raise store.StoreError(f"there is no record in '{places[0]}': name results that `harness run` wrote")
    return report


def run(
    suite: str | Path,
    *,
    results: str | Path = "results",
    place: Sequence[str] = (),
    only: str | None = None,
    rounds: int | None = None,
    fresh: bool = False,
    plugins: Sequence[str] = (),
) -> Report:
    """Measure a suite, given by its file or its name, in fresh processes; return its results.

    `results` is where records are kept: called again, it goes on where it stopped. `place` and `only` choose places and
    strategies, `rounds` replaces the suite's. Raises SuiteError, ClaimError, PluginError or StoreError with what to
    mend.
    """
    names = _several(plugins)
    loaded = doors.load(names)
    options = bench.Options(Path(results), names, rounds, fresh)
    plan = replace(_plan(suite, loaded, place, only, None, rounds), asked=words([str(suite)], names, rounds))
    return _report([session.run(plan, loaded, options, bench.Progress())], loaded)


@template.forking()
def predict(
    suite: str | Path,
    *,
    budget: str | int | None = None,
    memory: str | int | None = None,
    gpu_memory: str | int | None = None,
    gpu: str | None = None,
    place: Sequence[str] = (),
    only: str | None = None,
    plugins: Sequence[str] = (),
) -> Predictions:
    """Predict every case of a suite without running any: its peak in bytes, and whether it fits.

    `budget` is what a case may take ("8GiB", or a number of bytes). `memory`, `gpu_memory` and `gpu`, a card ("h100"),
    are those of the machine of which it may take a part; by default those of this one. Times need the rates of a
    machine, which `harness plan` measures: here they are None. Raises Refusal for a size or a card that nobody knows.
    """
    names = _several(plugins)
    loaded = doors.load(names)
    card = card_of(gpu, "gpu") if gpu is not None else None
    machine = this_machine((), cache_folder()).supposing(memory, gpu_memory, card)  # no rates: nothing is timed
    plan = _plan(suite, loaded, place, only, budget)
    demand_gpu(plan, gpu is not None or gpu_memory is not None)
    return Predictions(tuple(map(tuple, of_plan(plan, loaded, names, machine))))


def _plan(
    suite: str | Path,
    loaded: Plugins,
    place: Sequence[str],
    only: str | None,
    budget: str | int | None,
    rounds: int | None = None,
) -> Plan:
    plan = reader.read(shipped.suite(Path(suite)), loaded, rounds=rounds)
    claims.refuse(plan.suite.claims, [each.cases for each in plan.comparisons], str(suite))
    chosen = selected(plan, list(_several(place)) or None, only)
    return with_budget(chosen, None if budget is None else size(budget, "budget"))


def _several(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as a tuple; one by itself needs no list."""
    return (names,) if isinstance(names, str) else tuple(names)


def _report(files: Sequence[Path], loaded: Plugins) -> Report:
    return Report(tuple(results.read(files, lambda problem: warn(problem, stacklevel=4), loaded.aliases)), loaded)
