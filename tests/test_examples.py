"""Every example works as it is shipped, through the command line alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.machine import throughput
from harness.records import store

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
STRATEGY = EXAMPLES / "plugin" / "harness_example" / "checkpoint_mix.py"
INSTRUMENT = STRATEGY.with_name("page_faults.py")
SUITES = {
    EXAMPLES / "own_torch_model.yaml": (EXAMPLES / "own_torch_model.py",),
    EXAMPLES / "own_jax_model.yaml": (EXAMPLES / "own_jax_model.py",),
    EXAMPLES / "plugin" / "checkpoint_mix.yaml": (STRATEGY, INSTRUMENT),
}


def words_of(verb: str, suite: Path) -> list[str]:
    """Return a verb for an example and its plugins."""
    return [verb, str(suite), *(word for plugin in SUITES[suite] for word in ("--plugin", str(plugin)))]


def harness(verb: str, suite: Path, folder: Path, *options: str) -> str:
    """Run a verb on an example and its plugins; return what it prints."""
    command = [sys.executable, "-m", "harness", *words_of(verb, suite), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_here() -> None:
    files = {path for path in EXAMPLES.rglob("*.py") if path.name != "__init__.py"}
    assert files == {plugin for plugins in SUITES.values() for plugin in plugins}
    assert set(EXAMPLES.rglob("*.yaml")) == set(SUITES)


def counts(text: str) -> list[int]:
    """Count the tables of a plan, their baselines, their compositions, and the rows that fit."""
    return [text.count(each) for each in ("## ", "| baseline", "+ fused_loss`", "| yes")]


def due(suite: Path) -> list[int]:
    tables = 2 if suite.stem == "checkpoint_mix" else 1
    return [tables, tables, tables, 3 * tables]


@pytest.mark.long
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.stem)
def test_an_example_is_predicted(
    suite: Path, here: Callable[..., tuple[object, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rates of this machine, and the times of calls: to measure them takes most of a plan."""
    monkeypatch.setattr(throughput, "of_place", lambda place, cache: {"flops": {"float32": 1e11}, "bandwidth": 1e10})
    monkeypatch.setattr(throughput, "with_calls", lambda rates, *_: rates)
    status, text, errors = here(tmp_path, *words_of("plan", suite))
    assert status == 0, errors
    assert counts(text) == due(suite), "each is predicted, and fits"


def test_the_command_predicts_an_example(tmp_path: Path) -> None:
    suite = EXAMPLES / "own_jax_model.yaml"
    assert counts(harness("plan", suite, tmp_path)) == due(suite), "each is predicted, and fits"


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.stem)
def test_an_example_is_measured(suite: Path, tmp_path: Path) -> None:
    harness("run", suite, tmp_path, "--rounds", "0", "-k", "fused_loss")
    (file,) = store.newest(tmp_path / "results")
    records, problems = store.read(file)
    assert not problems
    assert {record.status for record in records if record.slot} == {"ok"}
    assert all("minor_faults" in record.extra for record in records if record.slot) == (INSTRUMENT in SUITES[suite])


@pytest.mark.long
def test_the_notebook_runs_from_the_top(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs the package pandas")
    (notebook,) = EXAMPLES.glob("*.ipynb")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4 and all(not cell.get("outputs") for cell in cells)
    told = "\nassert len(best) > 3 and best.peak_ratio.is_monotonic_increasing and scatter['count'].sum() > 10"
    told += "\nassert list(predicted.strategy)[0] == 'baseline' and predicted.fits.notna().all()"
    command = [sys.executable, "-W", "error", "-c", "\n".join(code) + told]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
