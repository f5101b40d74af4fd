"""A new strategy to begin from: its file, its test and its suite, which keep the contract as they are."""

import inspect
import keyword
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from harness.contract.plugins import NAME, Plugins
from harness.refusal import Refusal
from harness.suite.plan import CONTRIBUTIONS

EXAMPLE = "feed_checkpoint"
"""The strategy that a new one begins as: small, for torch and JAX, and of no other module of its group."""
TEST = '''"""What {name} promises: its contract, and that it saves what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import plugins, predict

FILE = Path(__file__).resolve().parent / "{name}.py"
PLUGINS = (str(FILE),)
STRATEGY = plugins.load(PLUGINS).strategies["{name}"]


def test_it_is_found_and_says_what_it_keeps() -> None:
    assert STRATEGY.rewrites == ("feed",) and STRATEGY.summary


@pytest.mark.parametrize("place", [f"{{backend}}/cpu" for backend in STRATEGY.on])
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
TAKEN = ("baseline", CONTRIBUTIONS, "null", "true", "false")
"""Names that mean something else in a suite: the row without strategies, all parts of a row, and what YAML reads as no
text."""


class NewError(Refusal):
    """A name or a place that a new strategy cannot have, in one sentence."""


@dataclass(frozen=True)
class New:
    """The files of a new strategy and their text, and the commands that test and run it."""

    files: dict[Path, str]
    check: str
    run: str


def strategy(name: str, folder: Path, plugins: Plugins) -> New:
    """Return the files of a strategy of that name: a file, its test and its suite, side by side in a folder.

    The file is that of `EXAMPLE` under the new name. Raises NewError for a name that is taken, no Python name or that
    of a module, for files that are there, and where the example is not installed.
    """
    if not (NAME.fullmatch(name) and name.isidentifier()) or keyword.iskeyword(name) or name != name.lower():
        remedy = "use at most 64 small letters, digits and '_', a letter first"
        raise NewError(f"'{name}' is no name for a strategy: {remedy}")
    if name in sys.stdlib_module_names:
        raise NewError(f"'{name}' is a module of Python, which the file '{name}.py' would hide: choose another name")
    if name in TAKEN:
        raise NewError(f"'{name}' means something else in a suite: choose another name")
    if name in plugins.strategies or name in plugins.aliases:
        raise NewError(f"there is a strategy '{name}' already: choose another name")
    path, test, suite = folder / f"{name}.py", folder / f"test_{name}.py", folder / f"{name}.yaml"
    files = {path: _example(name, plugins), test: TEST.format(name=name), suite: SUITE.format(name=name)}
    _refuse_existing(files)
    if (module := PathFinder.find_spec(name)) is not None and module.origin is not None:
        raise NewError(f"there is a module '{name}', which the file '{name}.py' would hide: choose another name")
    plugin = shlex.quote(str(path))
    return New(files, f"harness check {plugin}", f"harness run {shlex.quote(str(suite))} --plugin {plugin}")


def write(new: New) -> None:
    """Write the files; raise NewError where one cannot be written."""
    for path, text in new.files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise NewError(f"'{path}' cannot be written ({error.strerror}): choose another --folder") from None


def _example(name: str, plugins: Plugins) -> str:
    """Return the source of the example under another name."""
    if EXAMPLE not in plugins.strategies:
        raise NewError(f"there is no strategy '{EXAMPLE}' to begin from: install the harness with its strategies")
    module = inspect.getmodule(plugins.strategies[EXAMPLE].on["torch"])
    assert module is not None
    return inspect.getsource(module).replace(f'"{EXAMPLE}"', f'"{name}"')


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if os.path.exists(path):  # False where it cannot be asked: to write it says what is wrong
            raise NewError(f"'{path}' is there already: choose another name or --folder")
