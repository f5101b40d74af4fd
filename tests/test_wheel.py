"""The wheel alone, outside of a checkout: every verb, suites and results by name, types, licence, completion."""

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the files that git tracks, without a network."""
    pytest.importorskip("hatchling", reason="needs the package hatchling")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel where nothing else of the project is."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def harness(installed: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the installed harness in an empty folder."""
    empty = installed.parent / "empty"
    empty.mkdir(exist_ok=True)
    code = "import harness, os, sys; assert harness.__file__.startswith(os.environ['PYTHONPATH']), harness.__file__; "
    code += "from harness.cli.commands import main; sys.argv[0] = 'harness'; main()"
    whole = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", **env}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=empty, env=whole)


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        said = Parser().parsestr(archive.read(metadata).decode())
    assert said["License-Expression"] == "MIT" and "LICENSE" in said.get_all("License-File", [])
    assert any("Typing :: Typed" in each for each in said.get_all("Classifier", []))
    assert {"harness/py.typed", "strategies/py.typed", "harness/report/page.html.j2", "harness/report/page.js"} <= set(
        names
    )
    assert "harness/shipped/suites/long_context.yaml" in names
    assert not any(name.startswith(("tests/", "suites/")) for name in names)
    assert wheel.stat().st_size < 3 << 20


def test_suites_are_found_by_name_and_predicted(installed: Path) -> None:
    done = harness(installed, "plan", "smoke", "--place", "torch/cpu")
    assert done.returncode == 0, done.stderr
    assert "| baseline" in done.stdout
    refused = harness(installed, "plan", "smok")
    assert refused.returncode == 2 and "did you mean 'smoke'" in refused.stderr


def test_a_suite_is_run_and_reported_with_page_and_pictures(installed: Path, tmp_path: Path) -> None:
    results = str(tmp_path / "results")
    done = harness(installed, "run", "smoke", "--place", "torch/cpu", "--rounds", "0", "--results", results)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "results").rglob("*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["origin"]["commit"] == "unversioned"
    page, pictures = tmp_path / "page.html", tmp_path / "pictures"
    done = harness(installed, "report", results, "--page", str(page), "--pictures", str(pictures))
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 100_000 and list(pictures.glob("*.svg"))


def test_figures_of_strategies_come_with_it(installed: Path) -> None:
    done = harness(installed, "show", "fused_loss")
    assert done.returncode == 0, done.stderr
    assert "measured in torch: typically 0." in done.stdout


def test_every_verb_has_a_help_and_the_shell_completes(installed: Path) -> None:
    whole = harness(installed, "--help")
    verbs = [
        line.split()[0]
        for line in whole.stdout.partition("Commands")[2].splitlines()
        if line.startswith("  ") and line[2:3].strip()
    ]
    assert {"run", "plan", "report", "history", "bisect", "new"} <= set(verbs)
    for verb in verbs:
        done = harness(installed, verb, "--help")
        assert done.returncode == 0 and len(done.stdout.splitlines()) > 5, verb
    shown = harness(installed, "--show-completion", "bash")
    assert "_HARNESS_COMPLETE" in shown.stdout
    asked = {"_HARNESS_COMPLETE": "complete_bash", "COMP_WORDS": "harness his", "COMP_CWORD": "1"}
    assert harness(installed, **asked).stdout.split() == ["history"]
