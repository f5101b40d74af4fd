"""How other libraries are asked for what a strategy does: the function to call, or the setting to change."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from string import Template
from typing import NamedTuple

import yaml
from tabulate import tabulate

from harness.contract.strategy import Strategy
from harness.records import Applied, Case
from harness.report.text import code, with_code, with_full_stop

FILE = "counterparts.yaml"
FORMS = {
    "torch": ("torch", "{}"),
    "model": ("transformers", "AutoModelForCausalLM.from_pretrained(name, {})"),
    "trainer": ("transformers", "TrainingArguments(folder, {})"),
    "transformers": ("transformers", "{}"),
    "jax": ("jax", "{}"),
}
"""The library that each key of the file is shown under, and the code that its text goes into."""
JOINED = ("model", "trainer")
"""Keys whose texts are arguments of one call, which takes those of all members of a combination."""
LIBRARIES = tuple(dict.fromkeys(library for library, _ in FORMS.values()))
USED_WITH = {"torch": ("torch", "transformers"), "jax": ("jax",)}
"""The libraries that a run of each framework may use."""
HEADERS = ("strategy", *LIBRARIES, "what differs")

Member = tuple[Applied, Strategy]


class Counterpart(NamedTuple):
    """The code that asks a library for what some strategies do, by their names."""

    library: str
    code: str
    names: tuple[str, ...]


@cache
def entries() -> Mapping[str, Mapping[str, str]]:
    """Return the texts of the file by strategy and key."""
    text = resources.files("harness.report").joinpath(FILE).read_text(encoding="utf-8")
    known: Mapping[str, Mapping[str, str]] = yaml.safe_load(text)
    return known


def of(members: Sequence[Member]) -> list[Counterpart]:
    """Return the code that asks for some strategies with their knobs, library by library."""
    known = []
    for key, (library, call) in FORMS.items():
        texts = {strategy.name: text for applied, strategy in members if (text := _text(applied, strategy, key))}
        if key in JOINED and texts:
            known.append(Counterpart(library, call.format(", ".join(texts.values())), tuple(texts)))
        else:
            known += [Counterpart(library, call.format(text), (name,)) for name, text in texts.items()]
    return known


def _text(applied: Applied, strategy: Strategy, key: str) -> str:
    """Return the text of a strategy under a key of the file with its knobs; an empty one where there is none."""
    knobs = {name: knob.default for name, knob in strategy.knobs.items()} | dict(applied.knobs)
    return Template(entries().get(strategy.name, {}).get(key, "")).substitute(knobs)


def of_case(case: Case, strategies: Mapping[str, Strategy]) -> list[Counterpart]:
    """Return the code that asks for the strategies of a case, of the libraries that its framework works with."""
    libraries = USED_WITH[case.place.backend]
    return [each for each in of(_members(case, strategies)) if each.library in libraries]


def _members(case: Case, strategies: Mapping[str, Strategy]) -> list[Member]:
    return [(applied, strategies[applied.name]) for applied in case.strategies if applied.name in strategies]


def difference(strategy: Strategy) -> str:
    """Return what differs from a strategy there, as a sentence; an empty text where nothing is said."""
    note = entries().get(strategy.name, {}).get("note", "")
    return with_full_stop(note) if note else ""


def lines(strategy: Strategy) -> list[str]:
    """Write the code that asks for a strategy for a terminal: a line for each library, and what differs."""
    known = of([(Applied(name=strategy.name), strategy)])
    width = max((len(each.library) for each in known), default=0)
    shown = [f"{each.library:<{width}}  {each.code}" for each in known]
    shown += [difference(strategy)] if known and difference(strategy) else []
    return ["in your own code:", *(f"    {line}" for line in shown)] if shown else []


def of_choice(case: Case, strategies: Mapping[str, Strategy]) -> str:
    """Write the code that asks for the strategies of a case, library by library, and which of them none has.

    Returns an empty text where no library is known for any.
    """
    members, known = _members(case, strategies), of_case(case, strategies)
    pieces = []
    for library in USED_WITH[case.place.backend]:
        its = [f"{each.code}  # {', '.join(each.names)}" for each in known if each.library == library]
        if its:
            pieces.append("\n".join([f"In your own code, with {library}:\n\n```python", *its, "```"]))
    named = {name for each in known for name in each.names}
    remarks = [
        f"- {code(strategy.name)}: {with_code(difference(strategy))}"
        for _, strategy in members
        if strategy.name in named and difference(strategy)
    ]
    others = [code(strategy.name) for _, strategy in members if strategy.name not in named]
    if others:
        remarks.append(f"- without a known counterpart: {', '.join(others)}; `harness show` names the code")
    if pieces and remarks:
        pieces.append("\n".join(remarks))
    return "\n\n".join(pieces)


def table(strategies: Mapping[str, Strategy]) -> str:
    """Write the code that asks for each strategy that other libraries have, in the order of the file."""
    rows = []
    for name in filter(strategies.__contains__, entries()):
        known = of([(Applied(name=name), strategies[name])])
        cells = ("<br>".join(code(each.code) for each in known if each.library == library) for library in LIBRARIES)
        rows.append((code(name), *cells, with_code(difference(strategies[name]))))
    return tabulate(rows, HEADERS, tablefmt="pipe", disable_numparse=True)
