"""Find the commit at which a row of a suite became worse: measure it at commits between a good and a bad one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.contract.plugins import PluginError, load, printable
from harness.contract.workload import Workload
from harness.records import store
from harness.refusal import Refusal
from harness.suite import reader, shipped
from harness.suite.bounds import SuiteError
from harness.suite.plan import selected
from harness.verbs.compare import Condition, compare
from harness.verbs.history import UNDECIDED
from harness.verbs.pairing import completed
from harness.verdicts.judge import Comparison, judge


class BisectError(Refusal):
    """Commits or rows that cannot be searched, in one sentence."""


@dataclass(frozen=True)
class Attempt:
    """One commit that was measured: whether a condition was met there, None where nothing could be measured.

    Of the first one that is worse `unmeasured` counts the commits right before it that could not be: it may be one of
    them.
    """

    commit: str
    worse: bool | None
    why: str = ""
    unmeasured: int = 0


def between(root: Path, good: str, bad: str) -> list[str]:
    """List the commits after `good` up to `bad`, oldest first; raise BisectError where there is no way between them."""
    if (asked := _ran(root, "rev-parse", "--git-dir")).returncode:
        why = printable(next(iter(asked.stderr.splitlines()), "git does not say why"))
        raise BisectError(f"there is no repository of git here ({why}): run it in the one of the suite")
    for name in (good, bad):
        unknown = f"there is no commit '{printable(name)[:80]}' here: `git log` lists them"
        _asked(root, unknown, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    apart = f"'{good}' is no ancestor of '{bad}' here: name two commits of one history"
    _asked(root, apart, "merge-base", "--is-ancestor", good, bad)
    commits = _git(root, "rev-list", "--reverse", "--first-parent", f"{good}..{bad}").split()
    if not commits:
        raise BisectError(f"there is no commit between '{good}' and '{bad}': name two different ones")
    return commits


def first_worse(
    commits: Sequence[str], worse: Callable[[str], Attempt], log: Callable[[Attempt], None]
) -> Attempt | None:
    """Return the first commit known to be worse; None where the last one is not. Skip what cannot be measured.

    Every commit is tried at most once, about as often as the logarithm of their number. Raise BisectError where the
    last one cannot be measured.
    """
    attempts: dict[str, Attempt] = {}

    def try_(at: int) -> bool | None:
        commit = commits[at]
        if commit not in attempts:
            attempts[commit] = worse(commit)
            log(attempts[commit])
        return attempts[commit].worse

    low, high = -1, len(commits) - 1
    last = try_(high)
    if last is None:
        why = attempts[commits[high]].why
        raise BisectError(f"the suite shows nothing at '{commits[high]}' ({why}): name another bad commit")
    if not last:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        near = sorted(range(low + 1, high), key=lambda at: abs(at - middle))
        at = next((at for at in near if try_(at) is not None), None)
        if at is None:
            break
        low, high = (low, at) if attempts[commits[at]].worse else (at, high)
    return replace(attempts[commits[high]], unmeasured=high - low - 1)


def measured(
    root: Path,
    commit: str,
    suite: str,
    options: Sequence[str],
    folder: Path,
    aliases: Mapping[str, str] | None = None,
) -> list[Comparison] | str:
    """Measure a suite with the code of a commit, in a work tree of its own; return its comparisons, or why not.

    It runs in the folder of the tree that `root` is of the repository. Strategies have one name by `aliases`.
    """
    prefix = _git(root, "rev-parse", "--show-prefix")
    with _tree(root, commit) as tree:
        if not (tree / prefix).is_dir():
            return f"there is no folder '{printable(prefix)}'"
        command = [sys.executable, "-m", "harness", "run", suite, "--results", str(folder / commit), *options]
        done = subprocess.run(command, cwd=tree / prefix, env=_environment(tree), capture_output=True, text=True)
    files = store.newest(folder / commit) if (folder / commit).exists() else []
    if done.returncode or not files:
        return _last_line(done.stderr)
    return [table for file in files for table in judge(store.read(file, aliases)[0])]


def refuse_fixed(root: Path, plugins: Sequence[str]) -> None:
    """Raise BisectError for the file of a plugin that git tracks here and that is named by its whole path.

    It would be loaded as it is now at every commit, and none would be worse.
    """
    for name in plugins:
        if Path(name).is_absolute() and not _ran(root, "ls-files", "--error-unmatch", "--", name).returncode:
            fault = f"--plugin {printable(name)}: every commit would be measured with this file as it is now"
            raise BisectError(f"{fault}: name it as seen from this folder")


def refuse_mistyped(suite: str, places: Sequence[str], only: str | None, plugins: Sequence[str]) -> None:
    """Raise SuiteError for a suite that is not here, and for places or rows that it does not have as it is here.

    Where what lies here cannot be read, only commits can tell.
    """
    path = shipped.suite(Path(suite))
    if not path.is_file():
        raise SuiteError(f"there is no suite '{printable(suite)}' here: name one that is here and at both commits")
    try:
        plan = reader.read(path, load(plugins))
    except Refusal:
        return
    selected(plan, list(places), only)


def search(
    root: Path,
    suite: str,
    good: str,
    bad: str,
    conditions: Sequence[Condition],
    options: Sequence[str],
    log: Callable[[Attempt], None],
) -> Attempt | None:
    """Find the first commit at which a row meets a condition, compared with the good one; None where none does.

    Raises BisectError where the good or the bad commit cannot be measured.
    """
    commits = between(root, good, bad)
    aliases: Mapping[str, str] = {}
    workloads: Mapping[str, Workload] = {}
    with suppress(PluginError):  # what lies here may be broken, and is not what is measured
        loaded = load()
        aliases, workloads = loaded.aliases, loaded.workloads
    with TemporaryDirectory() as name:
        before = measured(root, good, suite, options, Path(name), aliases)
        if isinstance(before, str):
            raise BisectError(f"the suite does not run at '{good}' ({before}): name another good commit")
        if undecided := _undecided(before):
            reason = f"{', '.join(undecided)} did not get to run there"
            raise BisectError(
                f"of '{good}' too little is known ({reason}): try once more, or name the other rows by -k"
            )

        def worse(commit: str) -> Attempt:
            after = measured(root, commit, suite, options, Path(name), aliases)
            if isinstance(after, str):
                return Attempt(commit, None, after)
            undecided = _undecided(after)
            changes = [
                change
                for change in compare(completed(before, workloads), completed(after, workloads))
                if change.case.label not in undecided
            ]
            met = [change for change in changes if any(condition.met(change) for condition in conditions)]
            if not met and undecided:
                return Attempt(commit, None, f"{', '.join(undecided)} did not get to run")
            if not met and not any(change.of_both for change in changes):
                return Attempt(commit, None, "none of its cases has a figure that the good commit has")
            why = "; ".join(f"{change.case.label}: {change.figure} {change.how}" for change in met)
            return Attempt(commit, bool(met), why)

        return first_worse(commits, worse, log)


def _undecided(tables: Sequence[Comparison]) -> list[str]:
    """Return the rows that did not run for what the machine did in that hour, and not for their code."""
    return [row.label for table in tables for row in table.rows if row.status in UNDECIDED]


@contextmanager
def _tree(root: Path, commit: str) -> Iterator[Path]:
    """Check a commit out into a folder of its own, and remove it afterwards."""
    with TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        try:
            _git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            yield tree
        finally:
            subprocess.run(["git", "-C", str(root), "worktree", "remove", "--force", str(tree)], capture_output=True)


def _git(root: Path, *arguments: str) -> str:
    """Run git for as long as it takes; raise BisectError where it fails."""
    done = _ran(root, *arguments)
    if done.returncode:
        raise BisectError(f"git {arguments[0]} failed: {_last_line(done.stderr)}")
    return done.stdout.strip()


def _asked(root: Path, sentence: str, *arguments: str) -> None:
    """Ask git whether something is so; raise BisectError with the sentence where it is not."""
    if _ran(root, *arguments).returncode:
        raise BisectError(sentence)


def _ran(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError as error:
        raise BisectError(f"git cannot be run ({error.strerror}): install it") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


def _environment(tree: Path) -> dict[str, str]:
    """Return the variables of a process that has the code of a work tree before any other."""
    paths = (str(tree), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
