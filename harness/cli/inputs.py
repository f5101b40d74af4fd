"""What the arguments and options of several verbs mean: cases, a machine, results."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.cli.options import (
    BatchOption,
    BudgetOption,
    DocumentsOption,
    EvaluationsOption,
    GpuMemoryOption,
    GpuOption,
    MemoryOption,
    ModelOption,
    OnlyOption,
    PlaceOption,
    PluginOption,
    RanksOption,
    SuiteArgument,
    TokensOption,
    WithOption,
)
from harness.cli.screen import note, out
from harness.contract.place import Place
from harness.contract.plugins import Plugins
from harness.machine import gpu
from harness.machine.environment import cache_folder
from harness.records import store
from harness.report.results import Results, read
from harness.suite import of_model, reader, shipped
from harness.suite.bounds import SuiteError
from harness.suite.of_model import USUAL_TOKENS, Model
from harness.suite.plan import Plan, demand_gpu, selected, with_options, words
from harness.suite.units import size
from harness.verbs.machine import Machine, card_of, this_machine
from harness.verbs.plan import with_budget
from harness.verdicts import claims
from harness.workloads.causal_lm import configs

OTHER_ANSWERS = ("--allow", "lower_precision", "--allow", "approximate")


@dataclass(frozen=True)
class Cases:
    """The cases that a verb is for: those of a suite or of a model, at the places and of the strategies wanted."""

    path: SuiteArgument = None
    model: ModelOption = None
    tokens: TokensOption = None
    batch: BatchOption = None
    ranks: RanksOption = None
    documents: DocumentsOption = None
    evaluations: EvaluationsOption = None
    rows: WithOption = None
    place: PlaceOption = None
    only: OnlyOption = None
    plugin: PluginOption = None

    @property
    def plugins(self) -> tuple[str, ...]:
        """The plugins that are loaded beside the installed ones."""
        return tuple(self.plugin or ())

    def plan(
        self,
        loaded: Plugins,
        budget: str | None = None,
        on_gpu: bool = False,
        rounds: int | None = None,
        usual_tokens: int = USUAL_TOKENS,
    ) -> Plan:
        """Read a suite, or write and show that of a model, and keep the rows that the options choose.

        Each case has the budget if one is given; a control joins where there will be `rounds`, or the suite's. A model
        is for a GPU where there is one, or `on_gpu` says so, and for `usual_tokens` where the options name none.
        Raises SuiteError for what cannot be read, and for options of a model without one.
        """
        model = self._model(usual_tokens)
        if (self.path is None) == (model is None):
            raise SuiteError("name either a SUITE, which is a YAML file, or a model: --model NAME")
        if self.path is not None:
            plan = reader.read(shipped.suite(self.path), loaded, rounds=rounds)
            claims.refuse(plan.suite.claims, [each.cases for each in plan.comparisons], str(self.path))
        else:
            assert model is not None
            usual = "torch/cuda" if on_gpu or gpu.usable_bytes() is not None else "torch/cpu"
            text = model.suite(self.place or [usual])
            plan = reader.read(Path(f"{model.stem}.yaml"), loaded, text, rounds, of_model.OPTIONS)
        plan = selected(plan, self.place, self.only, f"--model {self.model}" if model is not None else "")
        if model is not None:
            out.print(f"```yaml\n{text}```\n")
        demand_gpu(plan, on_gpu)
        plan = replace(plan, asked=words(self.named(self.rows or ()), self.plugins, rounds))
        return with_budget(plan, None if budget is None else size(budget, "budget"))

    def answers(self, loaded: Plugins) -> list[str]:
        """Return the kinds of answers of the strategies that --with names: whoever names one allows it."""
        named = {loaded.aliases.get(name, name) for text in self.rows or () for name in of_model.names(text)}
        return sorted({loaded.strategies[name].declares for name in named & set(loaded.strategies)} - {"exact"})

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes that go with --model, by option."""
        return {
            "--tokens": self.tokens,
            "--batch": self.batch,
            "--ranks": self.ranks,
            "--documents": self.documents,
            "--evaluations": self.evaluations,
        }

    def named(self, rows: Sequence[str] = ()) -> list[str]:
        """Return the words of a command line that name the suite, or the model with its sizes and some rows."""
        suite = [] if self.path is None else [str(self.path)]
        rows_of_model = (("--with", row) for row in rows)
        return [*suite, *with_options([("--model", self.model), *self.sizes.items(), *rows_of_model])]

    def _model(self, usual_tokens: int) -> Model | None:
        if self.model is not None:
            name = configs.named(self.model) or self.model
            return Model(
                name,
                self.tokens,
                self.batch,
                tuple(self.rows or ()),
                self.documents,
                self.evaluations,
                usual_tokens,
                self.ranks,
            )
        for option, value in {**self.sizes, "--with": self.rows}.items():
            if value:
                raise SuiteError(f"{option} goes with --model: a suite says it itself")
        return None


@dataclass(frozen=True)
class Room:
    """What cases must fit: this machine, but for what the options replace, and a budget for each.

    Raises Refusal for a size that is none and for an unknown card, before anything is shown.
    """

    budget: BudgetOption = None
    memory: MemoryOption = None
    gpu_memory: GpuMemoryOption = None
    card: GpuOption = None

    def __post_init__(self) -> None:
        for name in ("budget", "memory", "gpu_memory"):
            if (text := getattr(self, name)) is not None:
                size(text, name.replace("_", " "))
        if self.card is not None:
            card_of(self.card, "--gpu")

    @property
    def on_gpu(self) -> bool:
        """Whether the options suppose a GPU."""
        return self.gpu_memory is not None or self.card is not None

    def machine(self, places: Sequence[Place]) -> Machine:
        """Return the machine that cases must fit, with the rates of places."""
        card = None if self.card is None else card_of(self.card, "--gpu")
        return this_machine((), cache_folder()).supposing(self.memory, self.gpu_memory, card).rated(places)


def among_all(cases: Cases, room: Room) -> str:
    """Name the command that looks for what fits, where nothing does."""
    return f"What fits, among all strategies, which takes minutes: `{advice_command(cases, room)}`"


def advice_command(cases: Cases, room: Room) -> str:
    """Return the command that looks for what fits, where nothing of a plan does."""
    limits = {"--budget": room.budget, "--memory": room.memory, "--gpu-memory": room.gpu_memory, "--gpu": room.card}
    several = {"--place": cases.place, "--plugin": cases.plugin}
    options = [(option, value) for option, values in several.items() for value in values or ()]
    chosen = with_options([*limits.items(), *options])
    return shlex.join(["harness", "advise", *cases.named(), *chosen, "--all", *OTHER_ANSWERS, "--predict-only"])


def results_of(paths: list[Path], loaded: Plugins, suites: Path | None = None) -> list[Results]:
    """Read the newest results below each path, with the claims of `suites`, and warn of lines that are no records.

    Of the results in a folder it notes those that have a part of an earlier run's rows.
    """
    files = [file for path in paths for file in store.newest(path)]
    if not files:
        raise store.StoreError(f"there are no results in '{paths[0]}': run a suite first")
    for sentence in (each for path in paths for each in store.notes_of_parts(path)):
        note(f"note: {sentence}")
    return read(files, lambda problem: note(f"warning: {problem}"), loaded.aliases, suites)
