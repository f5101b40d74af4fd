"""From a YAML file to cases: everything, and only, what may vary."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from harness.contract.place import DEVICES, NAMES, Place
from harness.contract.plugins import Plugins, nearest, printable
from harness.contract.strategy import Strategy
from harness.contract.workload import Workload
from harness.records import Applied, Case, Claim
from harness.records.case import CONTROL, VERDICT_ROUNDS
from harness.records.store import renamed_claim
from harness.suite import yaml
from harness.suite.bounds import MAX_CASES, MAX_RANKS, MAX_ROUNDS, SuiteError
from harness.suite.plan import CONTRIBUTIONS, Comparison, Plan, contributions
from harness.suite.schema import Suite
from harness.workloads.data import sources
from harness.workloads.data.frames import GENERATED
from harness.workloads.data.tokens import TOKENIZERS

GIB = 1 << 30
MAX_MEMBERS = 64
"""The most strategies of one row."""
PLACES = [f"{backend}/{device}" for backend in NAMES for device in DEVICES]
BESIDE = ("budget_gib", "corpus", "tokenizer")
UNION = ("int", "list[int]")
"""Names that pydantic has for the ways to write `ranks`: no keys of a suite."""
"""What a setting may say that is no size."""
Location = tuple[str | int, ...]


def read(
    path: Path,
    plugins: Plugins,
    text: str | None = None,
    rounds: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Plan:
    """Read a suite, or a `text` in place of the file, and check all of it; raise SuiteError before anything runs.

    It is for the `rounds` that it will run, by default those that it says itself. Where a command line wrote the text,
    `options` has the option for each key, and errors name that in place of a line.
    """
    if rounds is not None and not (isinstance(rounds, int) and 0 <= rounds <= MAX_ROUNDS):
        raise SuiteError(f"{rounds!r} rounds cannot be run: ask for 0 to {MAX_ROUNDS}")
    try:
        document = yaml.load(path) if text is None else yaml.loads(text, str(path))
    except yaml.YamlError as error:
        raise SuiteError(str(error)) from None
    reader = _Reader(path, document, plugins, rounds, options or {})
    return reader.plan()


class _Setting(NamedTuple):
    """What the cases of one comparison share besides the place."""

    shape: Any
    budget_bytes: int | None
    corpus: str
    tokenizer: str


class _Choices(NamedTuple):
    """What the comparisons of one setting choose from: each size's values, and what they share; and where it stands.

    `locations` has the place of each size, `location` that of all of them together.
    """

    sizes: dict[str, list[Any]]
    budget_bytes: int | None
    corpus: str
    tokenizer: str
    location: Location
    locations: dict[str, Location]

    @property
    def combinations(self) -> int:
        """How many comparisons these are."""
        return math.prod(map(len, self.sizes.values()))


class _Row(NamedTuple):
    """The strategies of a row, and on how many ranks it runs."""

    strategies: tuple[Applied, ...]
    ranks: int


@dataclass(frozen=True)
class _Reader:
    path: Path
    document: yaml.Document
    plugins: Plugins
    rounds: int | None
    options: Mapping[str, str]

    def refusal(self, location: Location, sentence: str) -> SuiteError:
        if location and (option := self.options.get(str(location[0]))):
            return SuiteError(printable(f"{option}: {sentence}"))
        line = yaml.line_of(self.document, location)
        place = f"{self.path}" + (f", line {line}" if line else "")
        key = ".".join(str(part) for part in location)
        return SuiteError(printable(f"{place}: {f'{key}: ' if key else ''}{sentence}"))

    def plan(self) -> Plan:
        suite = self.validated()
        workload = self.plugins.workloads.get(suite.workload)
        if workload is None:
            hint = nearest(suite.workload, self.plugins.workloads)
            raise self.refusal(("workload",), f"there is no workload '{suite.workload}'{hint}")
        for key in BESIDE:
            if key == "corpus" or key in suite.model_fields_set:
                self.checked(key, getattr(suite, key), workload, (key,))
        rows = self.on_ranks(suite, self.rows(suite, workload))
        places = self.places(suite, workload)
        self.refuse_patterns(suite)
        chosen = [(place, each) for place in places for each in self.choices(suite, workload, place)]
        total = len(rows) * sum(each.combinations for _, each in chosen)
        if total > MAX_CASES:
            raise self.too_many((), total)
        comparisons: dict[str, Comparison] = {}
        for place, each in chosen:
            for setting in self.settings(each, workload):
                comparison = self.comparison(suite, place, setting, rows)
                if (key := comparison.baseline.comparison_key) in comparisons:
                    raise self.refusal(
                        each.location, "this makes a comparison that is in the suite already: remove one"
                    )
                comparisons[key] = comparison
        return Plan(self.path.stem, self.path, suite, tuple(comparisons.values()))

    def corpus(self, name: Any, workload: Workload, location: Location) -> str:
        """Return the name of the corpus, the workload's usual one for None; refuse one that is not there."""
        usual, drawn = (GENERATED, GENERATED) if workload.data == "frames" else ("standard_library", None)
        name = usual if name is None else name
        if not isinstance(name, str):
            raise self.refusal(location, f"{_shown(name)} is not the name of a corpus")
        if name != drawn:
            try:
                sources.resolve(name, self.path.resolve().parent)
            except sources.CorpusError as error:
                raise self.refusal(location, str(error)) from None
        return name

    def validated(self) -> Suite:
        try:
            suite = Suite.model_validate(self.document.data)
        except ValidationError as error:
            raise self.explained(error, (), Suite) from None
        ids = [claim.id for claim in suite.claims]
        if again := next((at for at, each in enumerate(ids) if each in ids[:at]), None):
            raise self.refusal(("claims", again, "id"), f"'{ids[again]}' is the id of an earlier claim: give another")
        claims = [renamed_claim(claim, self.plugins.aliases) for claim in suite.claims]
        return suite.model_copy(update={"claims": claims})

    def explained(self, error: ValidationError, at: Location, model: type[BaseModel]) -> SuiteError:
        """Return the first error of pydantic as a sentence about its key."""
        first, *others = error.errors()
        if first["type"] == "missing":  # the key may be there, mistyped
            first = next((each for each in others if each["type"] == "extra_forbidden"), first)
        inner = tuple(part for part in first["loc"] if part not in UNION)
        location = (*at, *inner)
        if first["type"] == "extra_forbidden":
            keys = Claim.model_fields if inner[0] == "claims" else model.model_fields
            return self.refusal(location, f"there is no such key{nearest(str(inner[-1]), keys)}")
        if first["type"] == "missing":
            return self.refusal((*at, *inner[:-1]), f"the key '{inner[-1]}' is missing: add it")
        if first["type"] == "too_short":
            return self.refusal(location, "it is empty: give at least one")
        if first["type"] == "value_error":
            return self.refusal(location, str(first["ctx"]["error"]))
        sentence = first["msg"][0].lower() + first["msg"][1:]
        return self.refusal(location, f"{sentence}, not {_shown(first['input'])}")

    def places(self, suite: Suite, workload: Workload) -> list[Place]:
        places = []
        for index, text in enumerate(suite.places):
            try:
                place = Place.parse(text)
            except ValueError as error:
                raise self.refusal(("places", index), str(error)) from None
            if text not in PLACES:
                raise self.refusal(("places", index), f"there is no place '{text}'{nearest(text, PLACES)}")
            if place in places:
                raise self.refusal(("places", index), f"the place '{text}' is named twice: remove one")
            if place.backend not in workload.on:
                others = " or ".join(each for each in PLACES if Place.parse(each).backend in workload.on)
                sentence = f"the workload '{workload.name}' has no form for {place.backend}: write {others}"
                raise self.refusal(("places", index), sentence)
            places.append(place)
        return places

    def choices(self, suite: Suite, workload: Workload, place: Place) -> Iterator[_Choices]:
        """Yield what there is at a place: `shape`, changed by `at` for the place, then by each of `each` in turn."""
        overrides: list[tuple[Location, dict[str, Any]]] = [
            (("at", pattern), override) for pattern, override in suite.at.items() if fnmatch(str(place), pattern)
        ]
        if suite.each and all("preset" in override for override in suite.each):
            replaced: list[Location] = [("shape",)] if suite.shape else []
            replaced += [location for location, override in overrides if override.keys() - BESIDE]
            if replaced:
                sentence = "the preset of every entry of `each` takes its place: put these sizes into the entries"
                raise self.refusal(replaced[0], sentence)
        if not suite.each:
            yield self.overridden(suite, workload, overrides)
        for index, override in enumerate(suite.each):
            yield self.overridden(suite, workload, [*overrides, (("each", index), override)])

    def overridden(
        self, suite: Suite, workload: Workload, overrides: list[tuple[Location, dict[str, Any]]]
    ) -> _Choices:
        """Return what these overrides lead to."""
        location: Location = ("shape",)
        values, locations = dict(suite.shape), dict.fromkeys(suite.shape, location)
        beside: dict[str, Any] = {key: getattr(suite, key) for key in BESIDE}
        for location, override in overrides:
            sizes = {key: value for key, value in override.items() if key not in beside}
            for key in beside.keys() & override.keys():
                beside[key] = self.checked(key, override[key], workload, (*location, key))
            if "preset" in sizes:
                values, locations = {}, {}
            values |= sizes
            locations |= dict.fromkeys(sizes, location)
        values = self.preset(workload, values, locations.get("preset", location)) | values
        values.pop("preset", None)
        budget = None if beside["budget_gib"] is None else round(beside["budget_gib"] * GIB)
        corpus = self.corpus(beside["corpus"], workload, ("corpus",))
        sizes = self.listed(values, location, locations)
        return _Choices(sizes, budget, corpus, beside["tokenizer"], location, locations)

    def settings(self, choices: _Choices, workload: Workload) -> Iterator[_Setting]:
        """Yield each setting that may be chosen, the last size fastest."""
        for combination in _turns(choices.sizes):
            try:
                shape = workload.shape.model_validate(combination)  # type: ignore[attr-defined]
            except ValidationError as error:
                key = str(next(iter(error.errors()[0]["loc"]), ""))  # none where sizes do not fit each other
                raise self.explained(error, choices.locations.get(key, choices.location), workload.shape) from None
            if at := _not_finite(shape.model_dump()):
                location = (*choices.locations.get(str(at[0]), choices.location), *at)
                raise self.refusal(location, "a number that is not finite, which no result can hold: give a finite one")
            if getattr(shape, "evaluations", 0) and "evaluate" in workload.lacks:
                location = choices.locations.get("evaluations", choices.location)
                raise self.refusal(
                    location, f"the workload '{workload.name}' ends with its steps: leave out 'evaluations'"
                )
            yield _Setting(shape, choices.budget_bytes, choices.corpus, choices.tokenizer)

    def checked(self, key: str, value: Any, workload: Workload, location: Location) -> Any:
        """Check what an override says beside the shape: a budget, a corpus or a tokenizer."""
        if key == "corpus":
            return self.corpus(value, workload, location)
        if key == "tokenizer":
            if workload.data == "frames":
                sentence = f"the workload '{workload.name}' reads frames, which have no tokenizer: leave it out"
                raise self.refusal(location, sentence)
            if value not in TOKENIZERS:
                raise self.refusal(location, f"there is no tokenizer {_shown(value)}{nearest(str(value), TOKENIZERS)}")
        elif value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 1 / 64 <= value <= 1 << 16):
                raise self.refusal(location, f"{_shown(value)} is not a budget in GiB (from 1/64 to 65,536)")
        return value

    def refuse_patterns(self, suite: Suite) -> None:
        for pattern in suite.at:
            if not any(fnmatch(place, pattern) for place in PLACES):
                raise self.refusal(("at", pattern), f"no place matches '{pattern}'{nearest(pattern, PLACES)}")
            if not any(fnmatch(place, pattern) for place in suite.places):
                sentence = f"none of `places` matches '{pattern}': add one that does, or leave these settings out"
                raise self.refusal(("at", pattern), sentence)

    def too_many(self, location: Location, count: int) -> SuiteError:
        return self.refusal(location, f"{count} cases are more than {MAX_CASES}: shorten its lists")

    def listed(
        self, values: Mapping[str, Any], location: Location, locations: Mapping[str, Location]
    ) -> dict[str, list[Any]]:
        """Return the values that each key takes in turn: those of a list, or the one that there is.

        They stand at a location, single keys at others.
        """
        lists = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
        count = math.prod(map(len, lists.values()))
        if count > MAX_CASES:
            raise self.too_many(location, count)
        for key, choice in lists.items():
            at = (*locations.get(key, location), key)
            if not choice:
                raise self.refusal(at, "an empty list: give at least one value, or leave the key out")
            for index, value in enumerate(choice):
                if value in choice[:index]:
                    raise self.refusal(at, f"{_shown(value)} is listed twice: remove one")
        return lists

    def preset(self, workload: Workload, values: Mapping[str, Any], location: Location) -> dict[str, Any]:
        name = values.get("preset")
        if name is None:
            return {}
        if not isinstance(name, str) or name not in workload.presets:
            raise self.refusal(
                (*location, "preset"),
                f"there is no preset {_shown(name)}{nearest(str(name), workload.presets)}",
            )
        return dict(workload.presets[name])

    def rows(self, suite: Suite, workload: Workload) -> list[tuple[Applied, ...]]:
        """Return the rows of every comparison: the baseline, then each entry of `strategies`.

        The control joins where there can be speed verdicts, listed or not: without it nobody would believe them.
        """
        rows: dict[str, tuple[Applied, ...]] = {"baseline": ()}
        for index, entry in enumerate(suite.strategies):
            location: Location = ("strategies", index)
            together = isinstance(entry, dict) and CONTRIBUTIONS in entry
            parts = entry[CONTRIBUTIONS] if together else entry if isinstance(entry, list) else [entry]
            if together and len(entry) > 1:
                other = next(str(key) for key in entry if key != CONTRIBUTIONS)
                raise self.refusal((*location, other), f"'{CONTRIBUTIONS}' is alone in its entry: move '{other}' out")
            if not isinstance(parts, list):
                raise self.refusal(location, f"'{CONTRIBUTIONS}' needs a list of strategies, not {_shown(parts)}")
            if not parts:
                raise self.refusal(location, "an empty list: name at least one strategy")
            if len(parts) > MAX_MEMBERS:
                raise self.refusal(location, f"{len(parts)} strategies are more than {MAX_MEMBERS}: name fewer")
            options: list[list[Applied]] = []
            for part in parts:
                options.append(list(self.applied(part, location, workload)))
                of_each = 2 * len(parts) + 1 if together else 1
                if (count := len(rows) + of_each * math.prod(map(len, options))) > MAX_CASES:
                    raise self.too_many(location, count)
            for row in itertools.product(*options):
                names = [each.name for each in row]
                if again := next((name for at, name in enumerate(names) if name in names[:at]), None):
                    raise self.refusal(location, f"'{again}' is named twice in one row: leave one out")
                for members in contributions(row) if together else [row]:
                    same = " + ".join(map(_whichever_order, members))
                    if same in rows and not together:
                        label = " + ".join(map(str, members))
                        raise self.refusal(location, f"'{label}' is listed twice: remove one")
                    rows.setdefault(same, members)
        rounds = suite.rounds if self.rounds is None else self.rounds
        if rounds >= VERDICT_ROUNDS and CONTROL not in rows and CONTROL in self.plugins.strategies:
            rows = {"baseline": (), CONTROL: (Applied(name=CONTROL),), **rows}
        return list(rows.values())

    def applied(self, entry: Any, location: Location, workload: Workload) -> Iterator[Applied]:
        """Yield what `name` or `name: {knob: value}` asks for; a list of values means each in turn."""
        if isinstance(entry, dict) and len(entry) == 1:
            name, values = next(iter(entry.items()))
        else:
            name, values = entry, {}
        if not isinstance(name, str) or not isinstance(values, dict | None):
            raise self.refusal(location, f"{_shown(entry)} is not a strategy: write NAME, or NAME: {{knob: value}}")
        name = self.plugins.aliases.get(name, name)
        strategy = self.plugins.strategies.get(name)
        if name == "baseline":
            raise self.refusal(location, "the baseline is a row of every comparison by itself: leave it out")
        if strategy is None:
            known = nearest(name, self.plugins.strategies)
            elsewhere = " One" if known.endswith("?") else "; one"
            known += f"{elsewhere} of a plugin needs `--plugin FILE`"
            raise self.refusal(location, f"there is no strategy '{name}'{known}")
        if (misfit := strategy.misfit(workload)) is not None:
            raise self.refusal(location, f"{misfit}: leave it out, or choose another workload")
        for knobs in _turns(self.listed(values or {}, location, {})):
            yield Applied(name=name, knobs={key: self.knob(strategy, key, knobs[key], location) for key in knobs})

    def knob(self, strategy: Strategy, key: str, value: Any, location: Location) -> Any:
        knobs = strategy.knobs
        if key not in knobs:
            hint = nearest(key, knobs) if knobs else "; it has none"
            raise self.refusal(location, f"'{strategy.name}' has no knob '{key}'{hint}")
        wanted = knobs[key].type
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        if not fits:
            raise self.refusal(
                location, f"knob '{key}' of '{strategy.name}' takes {wanted.__name__}, not {_shown(value)}"
            )
        return float(value) if wanted is float else value

    def on_ranks(self, suite: Suite, rows: list[tuple[Applied, ...]]) -> list[_Row]:
        """Return each row with its ranks: 1, or where a strategy divides the run each number that the suite names."""
        counts = suite.ranks if isinstance(suite.ranks, list) else [suite.ranks]
        if not counts or not all(2 <= count <= MAX_RANKS for count in counts) or len(set(counts)) < len(counts):
            raise self.refusal(("ranks",), f"{_shown(suite.ranks)}: give numbers from 2 to {MAX_RANKS}, each once")

        def divides(row: tuple[Applied, ...]) -> bool:
            return any(self.plugins.strategies[applied.name].ranks for applied in row)

        if "ranks" in suite.model_fields_set and not any(map(divides, rows)):
            raise self.refusal(
                ("ranks",),
                "no strategy here divides the run among ranks: name one that does, such as fsdp, or leave it out",
            )
        if (count := sum(len(counts) if divides(row) else 1 for row in rows)) > MAX_CASES:
            raise self.too_many(("ranks",), count)
        return [_Row(row, count) for row in rows for count in (counts if divides(row) else [1])]

    def comparison(self, suite: Suite, place: Place, setting: _Setting, rows: list[_Row]) -> Comparison:
        cases = [
            Case(
                workload=suite.workload,
                shape=setting.shape.model_dump(),
                place=place,
                corpus=setting.corpus,
                tokenizer=setting.tokenizer,
                strategies=row,
                seed=suite.seed,
                budget_bytes=setting.budget_bytes,
                ranks=ranks,
            )
            for row, ranks in rows
        ]
        return Comparison(tuple(cases))


def _whichever_order(applied: Applied) -> str:
    """Return the label of a strategy with its knobs in the order of their names: it is one row in whichever."""
    return str(applied.model_copy(update={"knobs": dict(sorted(applied.knobs.items()))}))


def _turns(lists: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield each combination of values, the last one fastest."""
    for combination in itertools.product(*lists.values()):
        yield dict(zip(lists, combination, strict=True))


def _not_finite(value: Any) -> Location | None:
    """Return where in a value a number stands that is not finite, as in the file of a configuration; None for none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ()
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    return next(((key, *at) for key, each in inner if (at := _not_finite(each)) is not None), None)


def _shown(value: Any) -> str:
    """Return a value as a refusal quotes it, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
