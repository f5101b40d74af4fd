"""The GitHub action: its script measures, compares with a branch of records, and keeps them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.records import Case, Memory, Record, Slot, store

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


REAL = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m harness "$@"\n'
MADE_UP = """#!/bin/sh
echo "$@" >> "$LOG"
for last in "$@"; do :; done
if [ "$1" = run ]; then mkdir -p "$last/small/$MACHINE" && echo x > "$last/small/$MACHINE/1.jsonl"; fi
"""
"""A harness that writes down how it was called, and measures nothing."""


def tool(folder: Path, name: str, text: str) -> str:
    """Write a program, and return the path on which it is found first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def measured(root: Path, program: str = REAL, **given: str) -> "subprocess.CompletedProcess[str]":
    """Run the script as the action does, with the `harness` of these tests or another one."""
    env = {
        "SUITE": "small.yaml",
        "OPTIONS": "--rounds 0 --plugin made_up.py",
        "TABLE": str(root.parent / "table.md"),
        **given,
    }
    env["PATH"] = tool(root.parent / "bin", "harness", program)
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
    table = checkout.parent / "table.md"
    table.write_text("of another suite")
    done = measured(checkout, SUITE="nobody", KEEP="1")
    assert done.returncode == 2 and "there is no suite 'nobody'" in done.stderr
    assert not table.exists(), "it would be commented as that of this one"
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


WORDS = """#!/bin/sh
if [ "$1" = run ]; then shift 2; printf '%s\\n' "$@" | head -n -2 > "$LOG"; fi
exit 1
"""
"""A harness that writes down its options, one a line."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rounds 0\n--plugin made_up.py\n", ["--rounds", "0", "--plugin", "made_up.py"]),
        ('-k "checkpoint + fused_loss" --once', ["-k", "checkpoint + fused_loss", "--once"]),
        ("-k 'a \"b\"' -k ''", ["-k", 'a "b"', "-k", ""]),
        ("-k $(id) `id` $HOME * ; id #and", ["-k", "$(id)", "`id`", "$HOME", "*", ";", "id", "#and"]),
    ],
    ids=["several lines", "a quoted word", "quotes in quotes", "nothing is run"],
)
def test_options_are_split_as_in_a_shell(checkout: Path, tmp_path: Path, options: str, words: list[str]) -> None:
    measured(checkout, WORDS, OPTIONS=options, LOG=str(tmp_path / "log"))
    assert (tmp_path / "log").read_text().splitlines() == words


REFUSING = """#!/bin/sh
for last in "$@"; do :; done
if [ "$1" = run ]; then mkdir -p "$last/small/m" && echo x > "$last/small/m/1.jsonl"; exit; fi
if [ "$1" = compare ]; then echo "there is no condition '$5'" >&2; exit 2; fi
"""
"""A harness that knows no condition."""


def test_a_condition_that_nobody_can_read_is_refused_by_the_first_run_too(checkout: Path) -> None:
    done = measured(checkout, REFUSING, FAIL_ON="peak > 5\n \t\n", KEEP="1")
    assert done.returncode == 2 and "there is no condition 'peak > 5'" in done.stderr
    assert git(checkout, "ls-remote", "origin", "harness-records") == "", "and nothing is kept"


def test_options_name_no_other_folder_for_the_records(checkout: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    done = measured(checkout, MADE_UP, OPTIONS="--results out", LOG=log, MACHINE="m", KEEP="1")
    assert done.returncode == 0, done.stderr
    assert "First records of `small`" in (checkout.parent / "table.md").read_text()


def test_options_with_an_open_quote_measure_nothing(checkout: Path, tmp_path: Path) -> None:
    done = measured(checkout, WORDS, OPTIONS='-k "checkpoint + fused_loss', LOG=str(tmp_path / "log"))
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "log").exists()
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("the options of the action cannot be split into words (No closing quotation): ")


def test_the_records_of_a_suite_take_the_place_of_those_of_an_older_machine(checkout: Path, tmp_path: Path) -> None:
    for machine in ("a", "b"):
        done = measured(checkout, MADE_UP, KEEP="1", LOG=str(tmp_path / "log"), MACHINE=machine)
        assert done.returncode == 0, done.stderr
        git(checkout, "fetch", "--quiet", "origin")
        kept = git(checkout, "ls-tree", "-r", "--name-only", "origin/harness-records").splitlines()
        assert kept == [f"small/{machine}/1.jsonl"]


OVERTAKEN = """
case "$1" in compare | report) git -C "$RIVAL" push --quiet origin HEAD:refs/heads/harness-records;; esac
"""
"""Another job that puts its records on the branch after this one has read it."""


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_that_was_overtaken_keeps_its_records_all_the_same(checkout: Path, tmp_path: Path, begun: bool) -> None:
    given, rival = {"KEEP": "1", "LOG": str(tmp_path / "log")}, tmp_path / "rival"
    if begun:
        assert measured(checkout, MADE_UP, MACHINE="a", **given).returncode == 0
    git(tmp_path, "clone", "--quiet", *(["--branch", "harness-records"] if begun else []), "origin.git", str(rival))
    shutil.rmtree(rival / "small", ignore_errors=True)
    for suite in ("other", "small"):
        (rival / suite / "b").mkdir(parents=True)
        (rival / suite / "b" / "1.jsonl").write_text("x\n")
    git(rival, "add", "--all")
    git(rival, "commit", "--quiet", "-m", "theirs")
    done = measured(checkout, MADE_UP + OVERTAKEN, MACHINE="c", RIVAL=str(rival), **given)
    assert done.returncode == 0, done.stderr
    git(checkout, "fetch", "--quiet", "origin")
    kept = git(checkout, "ls-tree", "-r", "--name-only", "origin/harness-records").splitlines()
    assert kept == ["other/b/1.jsonl", "small/c/1.jsonl"]


def test_records_that_may_not_be_kept_fail_the_job_and_leave_the_table(checkout: Path, tmp_path: Path) -> None:
    hook = tmp_path / "origin.git" / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    done = measured(checkout, MADE_UP, KEEP="1", LOG=str(tmp_path / "log"), MACHINE="a")
    assert done.returncode == 1 and (tmp_path / "table.md").read_text().startswith("First records of `small`")
    assert "the records cannot be put on the branch harness-records: " in done.stderr.splitlines()[-1]


def test_records_that_cannot_be_read_fail_the_job_and_are_not_called_the_first(checkout: Path, tmp_path: Path) -> None:
    settings = {"LOG": str(tmp_path / "log"), "MACHINE": "a"}
    assert measured(checkout, MADE_UP, KEEP="1", **settings).returncode == 0
    git(checkout, "remote", "set-url", "origin", str(tmp_path / "gone.git"))
    done = measured(checkout, MADE_UP, **settings)
    assert done.returncode == 1 and not (tmp_path / "table.md").exists()
    assert "the records on the branch harness-records cannot be read: " in done.stderr.splitlines()[-1]


def test_a_tag_of_the_name_of_the_branch_is_not_what_is_compared_with(checkout: Path, tmp_path: Path) -> None:
    settings = {"LOG": str(tmp_path / "log"), "MACHINE": "a"}
    assert measured(checkout, MADE_UP, KEEP="1", **settings).returncode == 0
    git(checkout, "push", "--quiet", "origin", "HEAD:refs/tags/harness-records")
    assert measured(checkout, MADE_UP, **settings).returncode == 0
    assert "\ncompare " in (tmp_path / "log").read_text()


OF_OTHER_SIZES = f"""#!/bin/sh
for last in "$@"; do :; done
if [ "$1" = run ]; then mkdir -p "$last/small"; exec cp -r "$NEW" "$last/small/m"; fi
{REAL.partition(chr(10))[2].strip()}
"""
"""A harness that finds what it measures in a folder."""


@pytest.mark.parametrize(("conditions", "status"), [("peak>5%\nanswer\n", 0), ("answer\n missing \n", 1)])
def test_where_no_case_is_in_common_the_new_results_are_first_records(
    checkout: Path, tmp_path: Path, conditions: str, status: int
) -> None:
    table = tmp_path / "table.md"
    for tokens, expected in ((64, 0), (128, status)):
        case = Case(workload="decoder", shape={"tokens": tokens}, place="torch/cpu", corpus="zipf", tokenizer="bytes")
        slot = Slot(case=case.digest(), kind="memory")
        (tmp_path / str(tokens)).mkdir()
        record = Record(slot=slot, case=case, memory=Memory(peak_host_bytes=tokens << 20))
        store.append(tmp_path / str(tokens) / "1.jsonl", record)
        done = measured(checkout, OF_OTHER_SIZES, NEW=str(tmp_path / str(tokens)), FAIL_ON=conditions, KEEP="1")
        assert done.returncode == expected, done.stderr
        assert table.read_text().startswith("First records of `small`") and f"{tokens} tokens" in table.read_text()
    kept = git(checkout, "show", "origin/harness-records:small/m/1.jsonl")
    assert '"tokens": 128' in kept
    same = measured(checkout, OF_OTHER_SIZES, NEW=str(tmp_path / "128"), FAIL_ON=conditions)
    assert same.returncode == 0 and "0 worse" in table.read_text()


GH = """#!/bin/sh
echo "$@" >> "$LOG"
[ -z "$REFUSED" ] || { echo "gh: Resource not accessible by integration (HTTP 403)" >&2; exit 1; }
case "$*" in *--paginate*) printf '%s' "$IDS";; esac
"""


def commented(folder: Path, table: str, **given: str) -> "tuple[subprocess.CompletedProcess[str], list[str]]":
    """Run the last step of the action with a `gh` that writes down how it was called; return how."""
    *_, step = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    (folder / "table.md").write_text(table)
    env = {
        "TABLE": str(folder / "table.md"),
        "SUITE": "suites/mine.yaml",
        "BRANCH": "records",
        "NUMBER": "3",
        "GITHUB_REPOSITORY": "me/mine",
        "LOG": str(folder / "log"),
        "PATH": tool(folder / "bin", "gh", GH),
        **given,
    }
    (folder / "log").write_text("")
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(shell, env={**os.environ, **env}, capture_output=True, text=True)
    return done, (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("ids", "call"),
    [
        ("", "api --silent repos/me/mine/issues/3/comments -F body=@"),
        ("17\n18", "api --silent --method PATCH repos/me/mine/issues/comments/17 -F body=@"),
    ],
    ids=["a new one", "its own"],
)
def test_the_table_goes_into_the_comment_of_its_suite(ids: str, call: str, tmp_path: Path) -> None:
    done, (searched, written) = commented(tmp_path, "| a |\n", IDS=ids)
    assert done.returncode == 0, done.stderr
    assert searched.startswith("api --paginate repos/me/mine/issues/3/comments") and "env.MARKER" in searched
    assert written.startswith(call)
    assert Path(written.rpartition("@")[2]).read_text() == "<!-- harness: suites/mine.yaml, records -->\n\n| a |\n"


def test_where_it_may_not_comment_the_log_says_so_and_the_job_goes_on(tmp_path: Path) -> None:
    done, calls = commented(tmp_path, "| a |\n", REFUSED="1")
    assert done.returncode == 0 and len(calls) == 1
    assert done.stdout.startswith("::warning::") and "commenting is not allowed here" in done.stdout
    assert "HTTP 403" in done.stderr
    done, calls = commented(tmp_path, "", REFUSED="1")
    assert (done.returncode, done.stdout) == (0, "") and len(calls) == 1, "there is no table in the log either"


def test_without_a_table_there_is_no_comment_but_one_that_was_there_says_so(tmp_path: Path) -> None:
    done, (searched,) = commented(tmp_path, "")
    assert done.returncode == 0 and "--paginate" in searched
    done, (_, written) = commented(tmp_path, "", IDS="17")
    assert done.returncode == 0 and written.startswith("api --silent --method PATCH")
    assert "This run ended before there was a table" in Path(written.rpartition("@")[2]).read_text()


def test_a_table_of_another_suite_in_the_same_job_is_gone_before_anything_can_fail() -> None:
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    first = next(step["run"] for step in steps if "run" in step)
    (measure,) = (step for step in steps if step.get("id") == "measure")
    assert first.startswith(f'rm -f "{measure["env"]["TABLE"]}"')


def test_a_table_that_no_comment_holds_ends_with_a_whole_line(tmp_path: Path) -> None:
    line = "| one thing – another |"  # of more bytes than letters
    done, (_, written) = commented(tmp_path, f"{line}\n" * 3000)
    assert done.returncode == 0, done.stderr
    text = Path(written.rpartition("@")[2]).read_text(encoding="utf-8")
    rows = text.split("\n\n")[1].splitlines()
    assert set(rows) == {line} and 59_900 < len(f"{line}\n".encode()) * len(rows) <= 60_000
    assert text.endswith("\n\nThe rest is in the log of this run.\n")
