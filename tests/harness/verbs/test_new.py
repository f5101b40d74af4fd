"""A new strategy keeps its contract as it is written."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.suite import reader
from harness.verbs import new


def run(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder)


def test_its_file_is_a_plugin_and_its_suite_has_it_as_a_row(tmp_path: Path) -> None:
    done = run("-m", "harness", "new", "strategy", "my_feed", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["my_feed.py", "test_my_feed.py", "my_feed.yaml"]
    loaded = plugins.load((str(tmp_path / "my_feed.py"),))
    assert set(loaded.strategies["my_feed"].on) == {"torch", "jax"}
    text = (tmp_path / "my_feed.py").read_text()
    assert "strategies." not in text, "an author needs `harness` alone"
    assert loaded.strategies["my_feed"].about == loaded.strategies[new.EXAMPLE].about, "an example, and no copy of one"
    plan = reader.read(tmp_path / "my_feed.yaml", loaded)
    assert all([case.label for case in each.cases] == ["baseline", "nothing", "my_feed"] for each in plan.comparisons)


@pytest.mark.slow
def test_its_test_passes_and_its_contract_is_kept(tmp_path: Path) -> None:
    new.write(new.strategy("my_feed", tmp_path, plugins.load()))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_feed.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_its_test_asks_of_the_frameworks_that_are_left(tmp_path: Path) -> None:
    new.write(new.strategy("my_feed", tmp_path, plugins.load()))
    file = tmp_path / "my_feed.py"
    file.write_text(file.read_text().replace(', "jax": on_jax', ""))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_feed.py", "-k", "predicted", folder=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("checkpoint", "there is a strategy 'checkpoint' already"),
        ("documents", "there is a strategy 'documents' already"),
        ("Mine", "is no name for a strategy"),
        ("two words", "is no name for a strategy"),
        ("../up", "is no name for a strategy"),
        ("lambda", "is no name for a strategy"),
        ("mmap", "'mmap' is a module of Python"),
        ("pluggy", "there is a module 'pluggy', which the file 'pluggy.py' would hide"),
        ("baseline", "'baseline' means something else in a suite"),
        ("null", "'null' means something else in a suite"),
        ("contributions", "'contributions' means something else in a suite"),
        ("_mine", "a letter first"),
        ("é", "is no name for a strategy"),
        ("a" * 65, "at most 64"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(new.NewError, match=sentence):
        new.strategy(name, tmp_path, plugins.load())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(new.NewError, match=r"mine\.yaml' is there already"):
        new.strategy("mine", tmp_path, plugins.load())
    assert not (tmp_path / "mine.py").exists()


def test_a_folder_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    made = new.strategy("mine", tmp_path / ("a" * 300), plugins.load())
    with pytest.raises(new.NewError, match=r"cannot be written \(File name too long\): choose another --folder"):
        new.write(made)


def test_the_command_that_tests_it_can_be_pasted(tmp_path: Path) -> None:
    made = new.strategy("mine", tmp_path / "my folder", plugins.load())
    plugin, suite = (str(tmp_path / "my folder" / f"mine.{kind}") for kind in ("py", "yaml"))
    assert shlex.split(made.check) == ["harness", "check", plugin]
    assert shlex.split(made.run) == ["harness", "run", suite, "--plugin", plugin]
