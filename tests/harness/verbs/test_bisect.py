"""The first commit that is worse is found in few trials, also where some cannot be measured."""

import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli import bisect as verb
from harness.cli import commands
from harness.records import Applied, Case, Memory, Record, Slot, store
from harness.verbs import bisect
from harness.verbs.bisect import Attempt, BisectError, between, first_worse
from harness.verbs.compare import Condition
from harness.verdicts.judge import Comparison, Row


@pytest.mark.parametrize("first", [0, 1, 7, 30, 63])
def test_the_first_worse_commit_is_found_in_few_trials(first: int) -> None:
    commits = [str(number) for number in range(64)]
    tried: list[str] = []

    def worse(commit: str) -> Attempt:
        tried.append(commit)
        return Attempt(commit, int(commit) >= first)

    first_bad = first_worse(commits, worse, lambda tried: None)
    assert first_bad is not None and first_bad.commit == str(first)
    assert len(tried) == len(set(tried)) <= math.log2(64) + 2


def test_nothing_is_found_where_the_last_commit_is_good() -> None:
    assert first_worse(["a", "b"], lambda commit: Attempt(commit, False), lambda tried: None) is None


def test_a_bad_commit_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BisectError, match=r"shows nothing at 'b' \(no such suite\): name another bad commit"):
        first_worse(["a", "b"], lambda commit: Attempt(commit, None, "no such suite"), lambda tried: None)


def test_a_time_is_not_searched_in_rounds_too_few_to_show_one() -> None:
    refused = CliRunner().invoke(commands.app, ["bisect", "any.yaml", "--good", "HEAD", "--fail-on", "time>10%"])
    assert isinstance(refused.exception, BisectError) and "--rounds 0" in str(refused.exception)


@pytest.mark.parametrize("broken", [{5, 6, 7}, {0, 1, 2, 3}, {9}])
def test_commits_that_cannot_be_measured_are_passed_over(broken: set[int]) -> None:
    def worse(commit: str) -> Attempt:
        at = int(commit)
        return Attempt(commit, None if at in broken else at >= 8)

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

    def worse(commit: str) -> Attempt:
        with bisect._tree(project, commit) as tree:
            assert tree != project
            return Attempt(commit, (tree / "peak").read_text() == "2")

    first_bad = first_worse(commits, worse, lambda tried: None)
    assert first_bad is not None and git(project, "log", "-1", "--format=%s", first_bad.commit) == "5"
    assert git(project, "worktree", "list").count("\n") == 0, "nothing is left"
    assert (project / "number").read_text() == "7"


@pytest.mark.long
def test_the_commit_at_which_a_peak_doubled_is_found_by_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smallest: str, made_up: Path, cache: Path
) -> None:
    root = tmp_path / "project"
    entry = root / "made_up-1.dist-info" / "entry_points.txt"  # what stands in a work tree is installed for it
    entry.parent.mkdir(parents=True)
    entry.write_text("[harness]\nmade_up = made_up\n")
    entry.with_name("METADATA").write_text("Metadata-Version: 2.1\nName: made_up\nVersion: 1\n")
    git(root, "init", "--quiet")
    figures = made_up.read_text().replace('if task.kind == "memory"', "if False")  # of memory, too, without a worker
    assert "if False" in figures
    for number in range(8):
        peak = "1 << 20" if number < 5 else "2 << 20"
        (root / "made_up.py").write_text(figures.replace("host_bytes=1 << 20", f"host_bytes={peak}"))
        (root / "small.yaml").write_text(f"{smallest}# {number}\n" if number != 3 else "no suite")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", str(number))
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    done = CliRunner().invoke(commands.app, ["bisect", "small.yaml", "--good", "HEAD~7", "-k", "checkpoint"])
    assert done.exit_code == 0, done.output
    doubled = "1 MiB before, 2 MiB now (2.000 x)"
    (last,) = re.findall(r"^(\w+) is the first that is worse: (.*)$", done.stdout, re.MULTILINE)
    assert last == (git(root, "rev-parse", "HEAD~2"), f"baseline: peak {doubled}; checkpoint: peak {doubled}")
    tried = dict(re.findall(r"^(\w{7}) (worse|good|skipped)", done.stderr, re.MULTILINE))
    assert {git(root, "log", "-1", "--format=%s", commit): word for commit, word in tried.items()} == {
        "7": "worse",
        "3": "skipped",
        "2": "good",
        "4": "good",
        "5": "worse",
    }


def test_where_the_bad_commit_is_no_worse_the_status_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "search", lambda *rest: None)
    same = CliRunner().invoke(commands.app, ["bisect", "smoke", "--good", "HEAD~2"])
    assert (same.exit_code, same.stdout, same.stderr) == (1, "", "'HEAD' is no worse than 'HEAD~2'\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "there is no suite 'nosuch'; there is "),
        (["smoky"], "there is no suite 'smoky'; did you mean 'smoke'?"),
        (["nowhere.yaml"], "there is no suite 'nowhere.yaml' here: name one that is here and at both commits"),
        (["smoke", "-k", "checkpiont"], "no strategy's name contains 'checkpiont'"),
        (["smoke", "--place", "torch/cup"], "it has no place 'torch/cup'"),
    ],
)
def test_what_is_mistyped_is_said_before_any_commit_is_measured(
    words: list[str], said: str, project: Path, here: Callable[..., tuple[object, str, str]]
) -> None:
    status, shown, errors = here(project, "bisect", *words, "--good", "HEAD~2")
    assert (status, shown) == (2, "") and said in errors
    assert "name another good commit" not in errors


@pytest.mark.parametrize("broken", ["no suite", "workload: nothing of this name\n"])
def test_a_suite_that_is_broken_here_is_left_to_the_commits(
    broken: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "small.yaml").write_text(broken)
    monkeypatch.chdir(project)
    monkeypatch.setattr(verb, "search", lambda *rest: None)
    done = CliRunner().invoke(commands.app, ["bisect", "small.yaml", "--good", "HEAD~1", "-k", "checkpoint"])
    assert (done.exit_code, done.stderr) == (1, "'HEAD' is no worse than 'HEAD~1'\n")


def test_a_figure_that_is_lost_is_said_to_be_and_has_no_ratio(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(workload="decoder", shape={}, place="torch/cpu", corpus="x", tokenizer="bytes")
    good, bad = Row(case, "ok", peak_bytes=100 << 20), Row(case, "timeout", reasons=("it took too long",))
    after = git(project, "rev-parse", "HEAD")

    def measured(root: Path, commit: str, *rest: object) -> list[Comparison]:
        return [Comparison(case, (bad if commit == after else good,))]

    monkeypatch.setattr(bisect, "measured", measured)
    conditions = [Condition.parse(each) for each in ("peak>2%", "status")]
    first = bisect.search(project, "any.yaml", "HEAD~1", "HEAD", conditions, (), lambda tried: None)
    assert first is not None and first.why == (
        "baseline: status ok before, timeout now (it took too long); "
        "baseline: peak 100 MiB before, unknown now (it took too long)"
    )


def test_a_checkout_takes_as_long_as_it_takes_and_says_why_it_fails(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def slow(command: list[str], **settings: Any) -> "subprocess.CompletedProcess[str]":
        if settings.get("timeout") is not None:
            raise subprocess.TimeoutExpired(command, settings["timeout"])
        return run(command, **settings)

    monkeypatch.setattr(subprocess, "run", slow)
    assert len(between(project, "HEAD~1", "HEAD")) == 1
    with bisect._tree(project, "HEAD~1") as tree:
        assert (tree / "number").read_text() == "6"
    with (
        pytest.raises(BisectError, match="git worktree failed: fatal: invalid reference: nobody"),
        bisect._tree(project, "nobody"),
    ):
        pass


def test_the_code_of_a_commit_comes_before_the_modules_of_the_user(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path_factory.mktemp("own")
    for folder in (own, project):
        (folder / "harness").mkdir()
        (folder / "harness" / "__init__.py").touch()
    (own / "mine.py").touch()
    (own / "harness" / "__main__.py").write_text("raise SystemExit('that of the user')")
    (project / "harness" / "__main__.py").write_text("import mine; raise SystemExit('that of the commit')")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "-m", "harness")
    monkeypatch.setenv("PYTHONPATH", str(own))
    assert bisect.measured(project, "HEAD", "any.yaml", (), own / "results") == "that of the commit"


RECORDED = """
import sys
from pathlib import Path

folder = Path(sys.argv[4]) / "mine" / "m"
folder.mkdir(parents=True)
(folder / "1.jsonl").write_bytes(Path("records.jsonl").read_bytes())
"""
"""A harness whose results are there before it is asked for them."""


@pytest.fixture
def record(project: Path) -> Callable[..., None]:
    """Commit results below the project: the peak of a strategy in MiB, beside a baseline that stays as it is."""
    (project / "harness").mkdir()
    (project / "harness" / "__init__.py").touch()
    (project / "harness" / "__main__.py").write_text(RECORDED)
    file = project / "below" / "records.jsonl"
    file.parent.mkdir()

    def commit(name: str, mib: int, status: str = "ok", **sizes: object) -> None:
        file.unlink(missing_ok=True)
        shape = {"tokens": 64, **sizes}
        plain = Case(workload="decoder", shape=shape, place="torch/cpu", corpus="x", tokenizer="bytes")
        for case, peak in ((plain, 300), (plain.model_copy(update={"strategies": (Applied(name=name),)}), mib)):
            memory = Memory(peak_host_bytes=peak << 20, losses=(1.0,), regime="glibc-pinned")
            ended = status if case.strategies else "ok"
            figures = {"memory": memory} if ended == "ok" else {"status": ended}
            store.append(file, Record(slot=Slot(case=case.digest(), kind="memory"), case=case, **figures))
        git(project, "add", ".")
        git(project, "commit", "--quiet", "-m", "results")

    return commit


def searched(root: Path) -> Attempt | None:
    return bisect.search(root, "any.yaml", "HEAD~1", "HEAD", [Condition.parse("peak>2%")], (), lambda tried: None)


def test_a_row_is_followed_to_its_new_name_from_a_folder_below(project: Path, record: Callable[..., None]) -> None:
    record("documents", 100)
    record("document_windows", 200)
    first = searched(project / "below")
    assert first is not None and first.why == "document_windows: peak 100 MiB before, 200 MiB now (2.000 x)"


@pytest.mark.parametrize("status", ["skipped_guard", "killed_unknown"])
def test_a_row_that_did_not_get_to_run_says_nothing_of_its_code(
    status: str, project: Path, record: Callable[..., None]
) -> None:
    record("checkpoint", 100)
    record("checkpoint", 100, status)
    with pytest.raises(BisectError, match=r"shows nothing at .*\(checkpoint did not get to run\)"):
        searched(project / "below")
    record("checkpoint", 200)
    with pytest.raises(BisectError, match=r"of 'HEAD~1' too little is known .*: try once more, or name the other rows"):
        searched(project / "below")


def test_a_commit_of_other_cases_is_neither_good_nor_worse(project: Path, record: Callable[..., None]) -> None:
    record("checkpoint", 100)
    record("checkpoint", 200, tokens=128)
    with pytest.raises(BisectError, match="none of its cases has a figure that the good commit has"):
        searched(project / "below")


def test_a_row_is_followed_to_where_its_workload_gained_a_size(project: Path, record: Callable[..., None]) -> None:
    record("checkpoint", 100)
    record("checkpoint", 200, positions="rotary")
    first = searched(project / "below")
    assert first is not None and first.why == "checkpoint: peak 100 MiB before, 200 MiB now (2.000 x)"


def test_where_a_commit_lacks_the_folder_it_is_said(project: Path, record: Callable[..., None]) -> None:
    record("checkpoint", 100)
    with pytest.raises(BisectError, match=r"does not run at 'HEAD~1' \(there is no folder 'below/'\)"):
        searched(project / "below")


@pytest.mark.parametrize(("good", "bad"), [("HEAD", "HEAD~2"), ("HEAD", "HEAD")])
def test_commits_that_are_no_way_are_refused(good: str, bad: str, project: Path) -> None:
    with pytest.raises(bisect.BisectError, match="name two"):
        between(project, good, bad)


@pytest.mark.parametrize(("good", "bad"), [("nobody", "HEAD"), ("HEAD~1", "nobody")])
def test_a_mistyped_commit_is_named(good: str, bad: str, project: Path) -> None:
    with pytest.raises(BisectError, match="there is no commit 'nobody' here"):
        between(project, good, bad)


def test_without_a_repository_or_without_git_a_sentence_says_so(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(BisectError, match=r"there is no repository of git here \(fatal: .+\): run it in"):
        between(outside, "HEAD~1", "HEAD")
    monkeypatch.setenv("PATH", str(outside))
    with pytest.raises(BisectError, match=r"git cannot be run \(No such file or directory\): install it"):
        between(project, "HEAD~1", "HEAD")


@pytest.mark.parametrize(
    ("broken", "count", "said"),
    [
        ({5, 6, 7}, 3, "8 is the first that is worse, or one of the 3 before it that could not be measured: it grew\n"),
        ({7}, 1, "8 is the first that is worse, or the one before it that could not be measured: it grew\n"),
        ({5, 6}, 0, "8 is the first that is worse: it grew\n"),
    ],
)
def test_commits_before_it_that_could_not_be_measured_are_counted(
    broken: set[int], count: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worse(commit: str) -> Attempt:
        at = int(commit)
        return Attempt(commit, None if at in broken else at >= 8, "it grew")

    first = first_worse([str(number) for number in range(12)], worse, lambda tried: None)
    assert first is not None and (first.commit, first.unmeasured) == ("8", count)
    monkeypatch.setattr(verb, "search", lambda *rest: first)
    done = CliRunner().invoke(commands.app, ["bisect", "smoke", "--good", "0"])
    assert (done.exit_code, done.stdout) == (0, said)


def test_plugins_are_loaded_where_commits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(verb, "search", lambda *rest: asked.append(rest))
    words = ["bisect", "smoke", "--good", "0", "--plugin", "mine.py", "--plugin", "other"]
    CliRunner().invoke(commands.app, words)
    ((*_, options, _),) = asked
    assert options == ["--rounds", "0", "--plugin", "mine.py", "--plugin", "other"]


def test_a_file_that_would_be_the_same_at_every_commit_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(verb, "search", lambda *rest: None)
    for name in ("mine.py", "untracked.py"):
        (project / name).touch()
    git(project, "add", "mine.py")
    words = ["bisect", "smoke", "--good", "HEAD~1", "--plugin"]
    refused = CliRunner().invoke(commands.app, [*words, str(project / "mine.py")])
    assert isinstance(refused.exception, BisectError)
    assert f"--plugin {project}/mine.py: every commit would be measured with this file" in str(refused.exception)
    for name in ("mine.py", str(project / "untracked.py"), str(project.parent / "elsewhere.py")):
        assert CliRunner().invoke(commands.app, [*words, name]).exit_code == 1, "no commit is worse"
