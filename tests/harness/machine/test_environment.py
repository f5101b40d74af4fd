"""What a worker finds: programs that were compiled before, and modules of the folder it runs in or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import Place
from harness.machine import environment
from harness.records import Case, Task
from harness.run import runner

SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "batch": 1, "tokens": 33}


def predicted() -> int:
    case = Case(workload="decoder", shape=SHAPE, place="jax/cpu", corpus="drawn", tokenizer="none")
    (record,) = runner.run(Task(kind="predict", cases=(case,), run_id="cache", parent=os.getpid(), folder=""), 1, 120.0)
    assert record.status == "ok" and record.prediction.predicted_peak_bytes, record
    return record.prediction.predicted_peak_bytes


@pytest.mark.long
def test_a_cache_that_is_new_used_garbage_or_no_folder_gives_the_same_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "harness" / "jax-programs"
    figures = [predicted()]
    programs = [path for path in folder.rglob("*-cache") if path.is_file()]
    assert programs, "nothing was kept"
    figures.append(predicted())
    for path in programs:
        path.write_bytes(b"no program")
    figures.append(predicted())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    figures.append(predicted())
    assert len(set(figures)) == 1, figures


@pytest.mark.parametrize(
    ("backend", "name"), [("jax", "JAX_COMPILATION_CACHE_DIR"), ("torch", "TORCHINDUCTOR_CACHE_DIR")]
)
def test_a_worker_whose_compiling_is_measured_compiles(backend: str, name: str) -> None:
    place = Place(backend, "cpu")
    assert name not in environment.variables("memory", place, "run", 1, None)
    for kind in environment.COMPILED_BEFORE:
        assert name in environment.variables(kind, place, "run", 1, None)


@pytest.mark.parametrize(
    ("backend", "name"), [("jax", "JAX_COMPILATION_CACHE_DIR"), ("torch", "TORCHINDUCTOR_CACHE_DIR")]
)
def test_a_cache_that_cannot_be_written_keeps_no_programs(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework that is to keep its programs where nothing can be made does not start."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for kind in environment.COMPILED_BEFORE:
        assert name not in environment.variables(kind, Place(backend, "cpu"), "run", 1, None)


def test_a_worker_imports_from_the_folder_it_runs_in_only_where_the_harness_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("raise ImportError('of somebody else')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    env = environment.variables("memory", Place("torch", "cpu"), "run", 1, None)
    command = [sys.executable, "-m", "harness.records.place"]  # as a worker is started, without what it imports
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "PYTHONSAFEPATH" not in environment.variables("memory", Place("torch", "cpu"), "run", 1, None)
