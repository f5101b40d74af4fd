"""A new strategy to begin from: its file, its test and its suite, which keep the contract as they are."""

import keyword
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.contract.plugins import Plugins
from harness.refusal import Refusal

STRATEGY = '''"""Recompute the feed part in the backward pass; keep only its input, and run it twice.

Say here what is kept and what is paid, the peak that you expect, and the paper or document that it is from.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from harness import Parts, Strategy, hookimpl


def on_torch(parts: Parts) -> Parts:
    """Return the parts with a feed part that torch recomputes."""
    from torch.utils.checkpoint import checkpoint

    return replace(parts, feed=partial(checkpoint, parts.feed, use_reentrant=False))


def on_jax(parts: Parts) -> Parts:
    """Return the parts with a feed part that JAX recomputes."""
    import jax

    inner = parts.feed

    def feed(parts: Parts, p: Any, x_BTD: Any) -> Any:
        return jax.checkpoint(partial(inner, parts), prevent_cse=False)(p, x_BTD)

    return replace(parts, feed=feed)


@hookimpl
def harness_strategies() -> list[Strategy]:
    """Return the strategy."""
    on = {{"torch": on_torch, "jax": on_jax}}
    return [Strategy("{name}", rewrites=("feed",), on=on, about=__doc__)]
'''
TEST = '''"""What {name} promises: its contract, and that it saves what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import plugins, predict

FILE = Path(__file__).resolve().parent / "{name}.py"
PLUGINS = (str(FILE),)


def test_it_is_found_and_says_what_it_keeps() -> None:
    strategy = plugins.load(PLUGINS).strategies["{name}"]
    assert strategy.rewrites == ("feed",) and strategy.summary


@pytest.mark.parametrize("place", ["torch/cpu", "jax/cpu"])
def test_it_is_predicted_to_save_memory(place: str) -> None:
    pytest.importorskip(place.partition("/")[0])
    (rows,) = predict(FILE.with_suffix(".yaml"), place=[place], plugins=PLUGINS).comparisons
    peaks = {{row.case.label: row.peak_bytes or 0 for row in rows}}
    assert 0 < peaks["{name}"] < peaks["baseline"]


def test_it_keeps_its_contract() -> None:
    command = [sys.executable, "-m", "harness", "check", *PLUGINS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
'''
SUITE = """title: What {name} saves, and what it costs
workload: decoder
places: [torch/cpu, jax/cpu]
corpus: standard_library
tokenizer: bytes
shape: {{layers: 4, width: 128, heads: 4, vocabulary: 512, batch: 4, tokens: 512}}
strategies:
  - nothing
  - {name}
rounds: 8
"""
"""A suite in which the new strategy is a row."""


class NewError(Refusal):
    """A name or a place that a new strategy cannot have, in one sentence."""


@dataclass(frozen=True)
class New:
    """The files of a new strategy and their text, and the command that tests it."""

    files: dict[Path, str]
    check: str


def strategy(name: str, folder: Path, plugins: Plugins) -> New:
    """Return the files of a strategy of that name: a file, its test and its suite, side by side in a folder.

    Raises NewError for a name that is taken or no Python name, and for files that are there.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise NewError(f"'{name}' is no name for a strategy: use small letters, digits and '_', a letter first")
    if name in plugins.strategies or name in plugins.aliases:
        raise NewError(f"there is a strategy '{name}' already: choose another name")
    path, test, suite = folder / f"{name}.py", folder / f"test_{name}.py", folder / f"{name}.yaml"
    files = {path: STRATEGY.format(name=name), test: TEST.format(name=name), suite: SUITE.format(name=name)}
    _refuse_existing(files)
    return New(files, f"harness check {path}")


def write(new: New) -> None:
    """Write the files; raise NewError where one cannot be written."""
    for path, text in new.files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise NewError(f"'{path}' cannot be written ({error.strerror}): choose another --folder") from None


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise NewError(f"'{path}' is there already: choose another name or --folder")
