"""A strategy: a named rewrite of parts, its knobs, and where it can be applied."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from typing import Any

from harness.contract.data import Holding
from harness.contract.parts import DATA_PARTS, Parts
from harness.contract.place import Place
from harness.contract.workload import Workload

DECLARED = ("exact", "reordered", "lower_precision", "approximate")
"""What a strategy may declare of its answer, the nearest to that of the untouched parts first."""


class Unpredictable(Exception):
    """What a strategy raises in a prediction where abstract arrays cannot show what it takes: why, in one sentence."""


def lacking(need: str) -> str | None:
    """Return in words which package, or which version of it, is not installed; None where all is well."""
    package, _, least = need.partition(">=")
    if not _can_be_found(package):
        return f"the package {package}"
    if least and _release(present := _version(package)) < _release(least):
        return f"{package} {least} or newer, and {present} is installed"
    return None


def _can_be_found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of `a.b` without `a`
        return False


def _version(package: str) -> str:
    """Return the version of what an importable package was installed with, whose name may be another."""
    return version(next(iter(_distributions().get(package.partition(".")[0], [package]))))


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return what each importable package was installed with; it takes a fifth of a second to look at all of them."""
    return packages_distributions()


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


@dataclass(frozen=True)
class Knob:
    """One setting of a strategy: its name, type and default, read from the signature of its functions."""

    name: str
    type: type
    default: Any


@dataclass(frozen=True)
class Strategy:
    """A named function `Parts -> Parts`, one for each backend.

    `rewrites` names the parts that change, `calls` parts that they call. One that is named by both is wrapped: what
    another strategy, named before, made of it stays. `precision` declares a
    lower working dtype, `approximate` another algorithm; without them the answers must equal those of the untouched
    parts. `own_baseline` declares that something else is trained: rows with the strategy are judged against a run with
    it alone. `needs` are importable packages, with the least version where it matters (`"torch>=2.13"`). `excludes`
    maps a place where the strategy cannot work, or would change nothing, to the reason (`"jax/cpu": "..."`).
    `conflicts` maps strategies that it does not go together with to the reason, or `"before NAME"`, where it would be
    wrong if it were named before that one.
    `ranks` declares that the strategy divides the run among the ranks of a case: the suite sets their number.
    `probe` sets knobs for the small shape at which answers are compared, so that a chunk is smaller than the whole
    there too. `scaled` has functions of a knob's value, the shape and the small one, for knobs that decide by size
    what a row does: there it is to do the same. `aliases` are former names, which older suites and results use.
    `environment` are variables of the process that trains, for strategies that are none of the parts: of memory and
    time workers, where they are set before the interpreter starts. `alone` are values of knobs with which a step
    depends on what the kernel does for all processes, as its cache of files: such a row is timed without others beside
    it.

    For strategies of data: `feeds` declares how far the batches may differ from those of the baseline (see `FEEDS`),
    `data` restricts the strategy to `tokens`, `frames` or `documents`, and `holds(extent, **knobs) -> Holding` predicts
    its memory on the host.
    """

    name: str
    rewrites: tuple[str, ...]
    on: Mapping[str, Callable[..., Parts]]
    about: str
    calls: tuple[str, ...] = ()
    precision: str | None = None
    approximate: bool = False
    own_baseline: bool = False
    ranks: bool = False
    needs: tuple[str, ...] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    scaled: Mapping[str, Callable[[Any, Any, Any], Any]] = field(default_factory=dict)
    feeds: str = "same"
    data: str | None = None
    holds: Callable[..., Holding] | None = None
    aliases: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)

    def is_alone(self, knobs: Mapping[str, Any]) -> bool:
        """Check whether a row with these knobs is timed without others beside it."""
        values = {name: knob.default for name, knob in self.knobs.items()} | dict(knobs) if self.alone else {}
        return any(values[name] == value for name, value in self.alone.items())

    def probed(self, knobs: Mapping[str, Any], shape: Any, small: Any) -> dict[str, Any]:
        """Return the knobs for a small shape that stands for another: the same, but for `scaled` and `probe`."""
        values = {name: knob.default for name, knob in self.knobs.items()} | dict(knobs)
        scaled = {name: function(values[name], shape, small) for name, function in self.scaled.items()}
        return {**knobs, **scaled, **self.probe}

    @property
    def summary(self) -> str:
        """The first line of `about`: what the strategy does and what it costs."""
        return inspect.cleandoc(self.about).splitlines()[0] if self.about.strip() else ""

    @property
    def hides(self) -> set[str]:
        """The parts that it rewrites without calling them: what another strategy made of them is lost."""
        return set(self.rewrites) - set(self.calls)

    @property
    def declares(self) -> str:
        """What it declares of its answer: one of `DECLARED`."""
        if self.approximate:
            return "approximate"
        if self.precision:
            return "lower_precision"
        return "reordered" if self.feeds == "reordered" else "exact"

    @property
    def knobs(self) -> dict[str, Knob]:
        """The knobs of all backends together; raise TypeError for one without type or default."""
        knobs: dict[str, Knob] = {}
        for function in self.on.values():
            for parameter in list(inspect.signature(function).parameters.values())[1:]:
                typed = isinstance(parameter.annotation, type) and parameter.annotation is not parameter.empty
                if parameter.default is parameter.empty or not typed:
                    raise TypeError(
                        f"knob '{parameter.name}' of strategy '{self.name}' needs a default and a plain type"
                    )
                knobs[parameter.name] = Knob(parameter.name, parameter.annotation, parameter.default)
        return knobs

    def misfit(self, workload: "Workload") -> str | None:
        """Return in one sentence why the strategy can never be applied to a workload, or None when it can."""
        absent = [part for part in (*self.rewrites, *self.calls) if part in workload.lacks]
        if absent:
            verb = "rewrites" if absent[0] in self.rewrites else "calls"
            return f"'{self.name}' {verb} '{absent[0]}', a part that the workload '{workload.name}' does not have"
        if self.data not in (None, workload.data):
            return f"'{self.name}' is for {self.data}, and the workload '{workload.name}' reads {workload.data}"
        if workload.data == "documents" and self.data is None and DATA_PARTS & set(self.rewrites):
            return f"'{self.name}' is for windows of one length, and the workload '{workload.name}' reads documents"
        return None

    def obstacle(self, place: Place, workload: "Workload | None" = None) -> str | None:
        """Return in one sentence why the strategy cannot be applied at a place, or None when it can."""
        if place.backend not in self.on:
            return f"'{self.name}' has nothing for {place.backend}: it is written for {', '.join(self.on)}"
        if (reason := self.excludes.get(str(place))) is not None:
            return f"'{self.name}' does not run on {place}: {reason}"
        if (lack := next(filter(None, map(lacking, self.needs)), None)) is not None:
            return f"'{self.name}' needs {lack}: install it to measure this strategy"
        return self.misfit(workload) if workload is not None else None
