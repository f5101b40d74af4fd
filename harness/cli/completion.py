"""The values that a shell completes, found without torch and JAX; typer keeps those that begin as the word does.

Where none does the shell completes files, as it does for what is not here.
"""

from pathlib import Path

from harness.backends.cards import CARDS
from harness.contract import plugins
from harness.contract.place import DEVICES, NAMES
from harness.contract.strategy import DECLARED
from harness.refusal import Refusal
from harness.suite import shipped
from harness.workloads.causal_lm import configs


def suites() -> list[str]:
    """Return the suites that have a name, and the YAML files of this folder."""
    return [*shipped.names(), *sorted(map(str, Path().glob("*.yaml")))]


def models() -> list[str]:
    """Return the names of published models."""
    return list(configs.published())


def places() -> list[str]:
    """Return every backend on every device."""
    return [f"{backend}/{device}" for backend in NAMES for device in DEVICES]


def cards() -> list[str]:
    """Return the GPUs that can be supposed."""
    return list(CARDS)


def answers() -> list[str]:
    """Return the answers that can be allowed: an exact one always is."""
    return list(DECLARED[1:])


def offered() -> list[str]:
    """Return the strategies and workloads of the installed plugins."""
    loaded = _installed()
    return [*loaded.strategies, *loaded.workloads] if loaded else []


def rows(incomplete: str) -> list[str]:
    """Return what was typed of a row, `checkpoint,chunked_loss(chunk=512),`, with each strategy that may be next."""
    before, comma, _ = incomplete.rpartition(",")
    loaded = None if before.count("(") > before.count(")") else _installed()  # within knobs no strategy is next
    return [before + comma + name for name in loaded.strategies] if loaded else []


def _installed() -> plugins.Plugins | None:
    """Load the installed plugins; None where one cannot be used, which the command itself will say."""
    try:
        return plugins.load()
    except Refusal:
        return None
