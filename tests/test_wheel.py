"""The wheel alone, outside of a checkout: every verb, suites and results by name, types, licence, completion, needs."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


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


def needed(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that pip would install for requirements without extras, and for theirs in turn."""
    names: set[str] = set()
    rest = [Requirement(each) for each in requirements]
    while rest:
        each = rest.pop()
        name = canonicalize_name(each.name)
        if name not in names and (each.marker is None or each.marker.evaluate({"extra": ""})):
            names.add(name)
            rest += map(Requirement, distribution(each.name).requires or ())
    return names


def environment(folder: Path, wheel: Path, names: Iterable[str]) -> Path:
    """Make a virtual environment with the wheel and links to these installed distributions; return its programs."""
    # Not a fresh one that pip fills: each run of the tests would need a network and download all of it. So this shows
    # that something is not declared, unless a dependency brings it along, and not whether the versions are enough.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        files = distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(distribution(name).locate_file(top)))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-compile"]
    done = subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def in_environment(programs: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the program that pip wrote, in a folder, with nothing of these tests' own environment."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"}
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    return subprocess.run([programs / "harness", *words], capture_output=True, text=True, cwd=folder, env=own)


@pytest.fixture(scope="module")
def declared(wheel: Path) -> list[str]:
    """What the wheel needs, as it says itself."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])


@pytest.mark.long
def test_in_an_environment_of_the_declared_dependencies_it_lists_shows_and_reports(
    wheel: Path, declared: list[str], tmp_path: Path
) -> None:
    names = needed(declared)
    assert "typer" in names and not names & {"torch", "jax", "pytest"}
    programs = environment(tmp_path / "env", wheel, names)
    (results,) = tmp_path.glob("env/lib/python*/site-packages/harness/shipped/results")
    for words, said, status in (
        (["--help"], "Commands", 0),
        (["list"], "  fused_loss ", 0),
        (["show", "checkpoint"], "measured in torch: ", 0),
        (["report", str(results / "vocabulary")], "| baseline", 0),
        (["plan", "smoke", "--place", "torch/cpu"], "Not predicted: the package torch is not installed.", 1),
    ):
        done = in_environment(programs, tmp_path, *words)
        assert done.returncode == status and said in done.stdout, (words, done.stderr)


@pytest.mark.long
def test_a_dependency_that_is_not_declared_is_missed(wheel: Path, declared: list[str], tmp_path: Path) -> None:
    others = [each for each in declared if Requirement(each).name != "psutil"]
    programs = environment(tmp_path / "env", wheel, needed(others))
    done = in_environment(programs, tmp_path, "show", "checkpoint")
    assert done.returncode != 0 and "No module named 'psutil'" in done.stderr


def harness(installed: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the installed harness in an empty folder."""
    empty = installed.parent / "empty"
    empty.mkdir(exist_ok=True)
    code = "import harness, os, sys; assert harness.__file__.startswith(os.environ['PYTHONPATH']), harness.__file__; "
    code += "from harness.cli.commands import main; sys.argv[0] = 'harness'; main()"
    whole = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1", **env}
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=empty, env=whole)


@pytest.mark.slow
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


@pytest.mark.slow
def test_suites_are_found_by_name_and_predicted(installed: Path) -> None:
    done = harness(installed, "plan", "smoke", "--place", "torch/cpu")
    assert done.returncode == 0, done.stderr
    assert "| baseline" in done.stdout
    refused = harness(installed, "plan", "smok")
    assert refused.returncode == 2 and "did you mean 'smoke'" in refused.stderr


@pytest.mark.slow
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


@pytest.mark.slow
def test_figures_of_strategies_come_with_it(installed: Path) -> None:
    done = harness(installed, "show", "fused_loss")
    assert done.returncode == 0, done.stderr
    assert "measured in torch: typically 0." in done.stdout


@pytest.mark.slow
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
