"""The first commit that is worse is found in few trials, also where some cannot be measured."""

import math
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import commands
from harness.verbs import bisect
from harness.verbs.bisect import BisectError, Tried, between, first_worse


@pytest.mark.parametrize("first", [0, 1, 7, 30, 63])
def test_the_first_worse_commit_is_found_in_few_trials(first: int) -> None:
    commits = [str(number) for number in range(64)]
    tried: list[str] = []

    def worse(commit: str) -> Tried:
        tried.append(commit)
        return Tried(commit, int(commit) >= first)

    first_bad = first_worse(commits, worse, lambda tried: None)
    assert first_bad is not None and first_bad.commit == str(first)
    assert len(tried) == len(set(tried)) <= math.log2(64) + 2


def test_nothing_is_found_where_the_last_commit_is_good() -> None:
    assert first_worse(["a", "b"], lambda commit: Tried(commit, False), lambda tried: None) is None


def test_a_bad_commit_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BisectError, match=r"does not run at 'b' \(no such suite\): name another bad commit"):
        first_worse(["a", "b"], lambda commit: Tried(commit, None, "no such suite"), lambda tried: None)


def test_a_time_is_not_searched_in_rounds_too_few_to_show_one() -> None:
    refused = CliRunner().invoke(commands.app, ["bisect", "any.yaml", "--good", "HEAD", "--fail-on", "time>10%"])
    assert isinstance(refused.exception, BisectError) and "--rounds 0" in str(refused.exception)


@pytest.mark.parametrize("broken", [{5, 6, 7}, {0, 1, 2, 3}, {9}])
def test_commits_that_cannot_be_measured_are_passed_over(broken: set[int]) -> None:
    def worse(commit: str) -> Tried:
        at = int(commit)
        return Tried(commit, None if at in broken else at >= 8)

    first_bad = first_worse([str(number) for number in range(12)], worse, lambda tried: None)
    assert first_bad is not None and first_bad.commit == "8"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of eight commits; what a row takes doubles at the sixth."""
    git(tmp_path, "init", "--quiet")
    for number in range(8):
        (tmp_path / "peak").write_text("1" if number < 5 else "2")
        (tmp_path / "number").write_text(str(number))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", str(number))
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commits_between_two_are_listed_and_checked_out_beside_the_project(project: Path) -> None:
    commits = between(project, "HEAD~6", "HEAD")
    assert len(commits) == 6 and commits[-1] == git(project, "rev-parse", "HEAD")

    def worse(commit: str) -> Tried:
        with bisect._tree(project, commit) as tree:
            assert tree != project
            return Tried(commit, (tree / "peak").read_text() == "2")

    first_bad = first_worse(commits, worse, lambda tried: None)
    assert first_bad is not None and git(project, "log", "-1", "--format=%s", first_bad.commit) == "5"
    assert git(project, "worktree", "list").count("\n") == 0, "nothing is left"
    assert (project / "number").read_text() == "7"


@pytest.mark.parametrize(("good", "bad"), [("HEAD", "HEAD~2"), ("nobody", "HEAD"), ("HEAD", "HEAD")])
def test_commits_that_are_no_way_are_refused(good: str, bad: str, project: Path) -> None:
    with pytest.raises(bisect.BisectError, match="name two"):
        between(project, good, bad)
