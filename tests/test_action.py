"""The GitHub action: its script measures, compares with a branch of records, and keeps them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.records import store

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "measure_change"


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, smallest: str, made_up: Path) -> Path:
    """A clone of a repository with one suite, whose figures are made up."""
    git(tmp_path, "init", "--quiet", "--bare", "origin.git")
    root = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(tmp_path / "origin.git"), str(root))
    (root / "small.yaml").write_text(smallest)
    (root / "made_up.py").write_text(made_up.read_text())
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "a suite")
    return root


def measured(root: Path, **given: str) -> "subprocess.CompletedProcess[str]":
    """Run the script as the action does, with the `harness` of these tests."""
    bin_ = root.parent / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "harness").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m harness "$@"\n')
    (bin_ / "harness").chmod(0o755)
    env = {
        "SUITE": "small.yaml",
        "OPTIONS": "--rounds 0 --plugin made_up.py",
        "TABLE": str(root.parent / "table.md"),
        **given,
    }
    env["PATH"] = f"{bin_}:{os.environ['PATH']}"
    return subprocess.run([SCRIPT], cwd=root, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.long
def test_records_are_kept_on_a_branch_and_compared_with(checkout: Path) -> None:
    table = checkout.parent / "table.md"
    first = measured(checkout, KEEP="1")
    assert first.returncode == 0, first.stderr
    assert "First records of `small`" in table.read_text() and "| baseline" in table.read_text()
    assert git(checkout, "ls-tree", "-r", "--name-only", "origin/harness-records").startswith("small/")
    second = measured(checkout, FAIL_ON="peak>5%\nanswer\n\n")
    assert second.returncode == 0, second.stderr
    assert "0 worse" in table.read_text()
    assert git(checkout, "worktree", "list").count("\n") == 0, "nothing is left"

    text = (checkout / "made_up.py").read_text()
    (checkout / "made_up.py").write_text(text.replace("peak_host_bytes=1 << 20", "peak_host_bytes=1 << 21"))
    worse = measured(checkout, FAIL_ON="peak>5%")
    assert worse.returncode == 1, worse.stderr
    assert "| worse" in table.read_text() and "2.00 x" in table.read_text()
    assert measured(checkout, FAIL_ON="answer").returncode == 0, "what is not asked for fails nothing"


def test_a_suite_that_does_not_run_keeps_nothing(checkout: Path) -> None:
    done = measured(checkout, SUITE="nobody", KEEP="1")
    assert done.returncode == 2 and "there is no suite 'nobody'" in done.stderr
    assert git(checkout, "ls-remote", "origin", "harness-records") == ""


def test_the_action_gives_the_script_what_it_reads() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "measure")
    assert step["run"].endswith("/.ci/measure_change")
    read = set(re.findall(r"\$\{([A-Z_]+)", SCRIPT.read_text()))
    assert read == set(step["env"])
    used = set(re.findall(r"inputs\.([a-z-]+)", str(action["runs"])))
    assert used == set(action["inputs"])
    assert store.NAME.fullmatch(action["inputs"]["branch"]["default"])
