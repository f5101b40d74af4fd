"""Which code that decides a figure has changed since a result, judged by what it does and not by how it is written."""

import ast
import hashlib
import inspect
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from harness.contract.strategy import Strategy
from harness.machine import facts
from harness.records.case import Case
from harness.records.place import Place
from harness.records.record import Record

DECIDING = (
    *("backends", "contract", "machine/environment.py", "machine/memory.py"),
    *("run/runner.py", "run/turns.py", "worker", "workloads"),  # the runner watches what child processes take
)
"""Code of the harness that decides a figure; all other code judges, plans or shows it, and is run anew."""
PREDICTING = (
    *("harness/worker/prediction.py", "harness/backends/processor.py"),
    *(f"harness/backends/{name}.py" for name in ("ledger", "cards", "cuda_*", "*_cuda*", "*_flops", "torch_autocast")),
    *(f"harness/backends/torch_{name}.py" for name in ("memory", "operators", "calls", "turns")),
    *(f"harness/backends/torch_{name}.py" for name in ("storage", "kernels", "packing", "graph")),
    *(f"harness/backends/torch_{name}.py" for name in ("lstm", "convolutions", "promotion", "reductions")),
    *("harness/backends/jax_scratch.py", "harness/contract/toolkit/turns.py"),
)
"""Those of them that predict, and measure nothing."""
TOOLS = tuple(f"harness/contract/toolkit/{name}.py" for name in ("mapped_files", "update_rules"))
"""Modules of those rooms that strategies alone use: one counts where they name it."""
KNOBS = "knobs"
"""The module that refuses values of knobs."""
CHECKING = (
    *("harness/worker/contract_checks.py", "harness/worker/calibration.py", "harness/worker/throughput.py"),
    *("harness/contract/plugins.py", "harness/contract/errors.py", f"harness/contract/toolkit/{KNOBS}.py"),
)
"""Those that load or test a plugin, a machine or a knob, or name an error: no figure of a suite is theirs."""
DEVICE = re.compile(r'^DEVICE = "(\w+)"$', re.MULTILINE)
"""How a module says that one kind of device alone runs it: figures of others do not depend on it."""
IMPORT = re.compile(r"^ *from (strategies\.[\w.]+) import (\([^)]*\)|[^(#\n]*)", re.MULTILINE)
"""How a module imports from those of strategies."""
STATED = ("holds", "Holding", "Held", "conflicts", "calls")  # Held: what Holding was called
"""What a strategy states of its memory, in which form, and of what it goes together with: none of it runs."""
OF_CHILDREN = frozenset({"_read_children", "same_program"})
"""Functions that read the processes which a worker starts: they decide figures of results that have such."""
OF_DOCUMENTS = frozenset({"_sizes_of"})
"""Functions that look at batches of texts of all lengths: they decide figures of results on `documents`."""
DOCUMENTED = ("documents", "causal_lm_documents")
"""The workloads of such texts."""
OF_USER_MODELS = frozenset({"_apart"})
"""Functions that take gradients as a user's own model has them: no workload of this project has such."""
REFUSALS = ("ValueError", "PluginError", "Refusal")
"""What is raised for a value or a plugin that is wrong: whatever has figures has passed."""
ROOT = Path(__file__).resolve().parents[2]


def written(form: Any) -> Any:
    """Return the function that somebody wrote of a form: a partial has the module of functools, a wrapper its own."""
    while isinstance(form, partial):
        form = form.func
    return inspect.unwrap(form)


def files_of(strategies: Iterable[Strategy]) -> tuple[str, ...]:
    """Return the files and folders of strategies within this project, and what their modules share with others.

    Those are the private modules of a group, and what is imported from other strategies, directly or not.
    """
    places: dict[str, None] = {}
    for strategy in strategies:
        for form in strategy.on.values():
            module = sys.modules.get(written(form).__module__)
            if module is None or module.__file__ is None or not Path(module.__file__).is_relative_to(ROOT):
                continue
            path = Path(module.__file__)
            home = path.parent if path.name == "__init__.py" else path
            places |= dict.fromkeys(_files(home, home.parent / f"{strategy.name}.py", ROOT))
    return tuple(places)


@cache
def _files(home: Path, named: Path, root: Path) -> tuple[str, ...]:
    """Return what decides a form that lies at `home`; the file `named` may pass its settings to what its group shares.

    It is read once: what a process has imported stays as it was.
    """
    shared = (file for file in home.parent.glob("_*.py") if file.name != "__init__.py")
    used = _with_imports((home, *shared, *filter(Path.is_file, (named,))))
    texts = [_text(file) for each in used for file in _modules(each)]
    tools = (tool for tool in TOOLS if any(PurePath(tool).stem in text for text in texts))
    return (*(str(each.relative_to(root)) for each in used), *tools)


def _with_imports(paths: Iterable[Path]) -> list[Path]:
    """Return files and folders, and after them what their modules import from strategies, each once."""
    used: list[Path] = []
    left = list(paths)
    while left:
        path = left.pop(0)
        if not any(path.is_relative_to(each) for each in used):
            used.append(path)
            left += [each for file in _modules(path) for each in _imports(_text(file))]
    return used


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")  # it may lie beside a plugin that is installed


def _imports(text: str) -> Iterator[Path]:
    """Yield the modules of strategies from which a text imports: those of a package by name, or else its own."""
    for name, imported in IMPORT.findall(text):
        base = ROOT.joinpath(*name.split("."))
        for each in re.findall(r"(\w+)(?: as \w+)?", imported):
            ways = (base.with_suffix(".py"), base / f"{each}.py", base / each / "__init__.py", base / "__init__.py")
            if (file := next(filter(Path.is_file, ways), None)) is not None:
                yield file


def digests(files: Iterable[str]) -> dict[str, str]:
    """Return a digest of each module of the deciding rooms and of `files`, for a result to carry.

    The commit that a result names may be gone one day, or never was: these can be compared still.
    """
    files = tuple(files)
    names = dict.fromkeys((*(f"harness/{room}" for room in DECIDING), *files))
    modules = {str(module.relative_to(ROOT)): module for name in names for module in _modules(ROOT / name)}
    return {
        name: hashlib.sha256(module.read_bytes()).hexdigest()[:10]
        for name, module in modules.items()
        if name not in TOOLS or name in files
    }


def _modules(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(path.rglob("*.py"))
    elif path.is_file():
        yield path


def differing(written: Mapping[str, str], files: Collection[str] = ()) -> tuple[str, ...]:
    """Return the modules that are not what they were when a result whose strategies are `files` got these digests."""
    now = digests(written)
    names = (name for name in written.keys() | now.keys() if written.get(name) != now.get(name))
    return tuple(sorted(name for name in names if name not in TOOLS or name in files))


@cache
def changed(commit: str, files: tuple[str, ...], aside: frozenset[str] = frozenset()) -> tuple[str, ...] | None:
    """Return the files of the deciding rooms, and those among `files`, that do something else than at a commit.

    Functions `aside` are left out. None where that cannot be known: outside git, for a commit that this history lacks,
    for code that was never committed.
    """
    if commit.endswith("-dirty"):
        return None
    rooms = [f"harness/{room}" for room in DECIDING]
    try:
        facts.git(ROOT, "cat-file", "-e", f"{commit}^{{commit}}")
        lines = facts.git(
            ROOT, "diff", "--raw", "--no-renames", "--no-abbrev", commit, "--", *rooms, *files
        ).splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):  # no text that git can be passed
        return None
    names = [(line.partition("\t")[2], line.split()[2]) for line in lines]
    return tuple(
        name
        for name, blob in names
        if name.endswith(".py") and (name not in TOOLS or name in files)
        if _meaning_of_blob(blob, aside) != _meaning(ROOT / name, aside)
    )


APART = ("causal_lm", "scoring", "temporal", "user_model", "whole_run")
"""Rooms of the workloads that decide only figures of those cases that `rooms` names them for."""
ROOM = {"causal_lm_documents": "causal_lm"}
"""The room of a workload that has not its name."""
SHARED = {"user_model/kinds.py": "causal_lm", "user_model/shared.py": "causal_lm"}
"""Files of a room that another one uses as well."""
SHIPPED = ("decoder", "documents", "scoring", "temporal", "causal_lm", "causal_lm_documents")
"""Workloads that come with the harness, and are no user's own model."""


class Roles(NamedTuple):
    """Files that have changed, by what they are to a figure: what was run, what measured it, what predicted it."""

    run: tuple[str, ...]
    measuring: tuple[str, ...]
    predicting: tuple[str, ...]


def since(records: Sequence[Record], strategies: Mapping[str, Strategy]) -> Roles | None:
    """Return what does something else now than when records were made; None where that cannot be known.

    What predicts is compared with the code of the predictions that stand: a later one takes the place of another.
    """
    records = [record for record in records if record.origin.commit or record.origin.utc]
    cases = [record.case for record in records if record.case]
    names = sorted({applied.name for case in cases for applied in case.strategies})
    files = files_of(strategies[name] for name in names if name in strategies)
    written = {record.origin.commit: record.heading.code for record in records if record.heading.code}
    needed, places = rooms(cases), {case.place for case in cases}
    aside = _without_part(records, cases)

    def changes(commit: str) -> tuple[str, ...] | None:
        known = changed(commit, files, aside)
        return differing(written[commit], files) if known is None and commit in written else known

    by_commit = {commit: changes(commit) for commit in dict.fromkeys(record.origin.commit for record in records)}
    if not by_commit or None in by_commit.values():
        return None
    standing = {record.slot or at: record for at, record in enumerate(records) if record.case and is_prediction(record)}
    predicted = {record.origin.commit for record in standing.values()}
    measured = {record.origin.commit for record in records if not (record.slot and is_prediction(record))}
    in_roles = {commit: roles(names or (), needed, places) for commit, names in by_commit.items()}
    return Roles(
        _once(in_roles, by_commit, "run"),
        _once(in_roles, measured, "measuring"),
        _once(in_roles, predicted, "predicting"),
    )


def _without_part(records: Iterable[Record], cases: Collection[Case]) -> frozenset[str]:
    """Return the functions of deciding files that decide no figure of some records."""
    aside: set[str] = set()
    if not any(record.child_peak_bytes is not None and not is_prediction(record) for record in records):
        aside |= OF_CHILDREN
    if not any(case.workload in DOCUMENTED for case in cases):
        aside |= OF_DOCUMENTS
    if all(case.workload in SHIPPED for case in cases):
        aside |= OF_USER_MODELS
    return frozenset(aside)


def is_prediction(record: Record) -> bool:
    """Check whether a record is that of a prediction: alone, or with limits that were searched by predictions."""
    return record.slot is None or record.slot.kind == "predict"


def _once(in_roles: Mapping[str, Roles], commits: Iterable[str], role: str) -> tuple[str, ...]:
    """Return the files of a role that differ from any of some commits."""
    return tuple(dict.fromkeys(name for commit in commits for name in getattr(in_roles[commit], role)))


def rooms(cases: Iterable[Case]) -> set[str]:
    """Return the rooms of the workloads that some cases need, of those that stand apart."""
    needed = set()
    for case in cases:
        room = ROOM.get(case.workload, case.workload)
        needed.add(room if room in SHIPPED else "user_model")
        if case.shape.get("evaluations"):
            needed.add("whole_run")
    return needed


def roles(names: Iterable[str], needed: Collection[str], places: Collection[Place]) -> Roles:
    """Sort files into their roles for cases that need some rooms, at some places; what those do not use is left out."""
    run: list[str] = []
    measuring: list[str] = []
    predicting: list[str] = []
    for name in names:
        if _is_elsewhere(name, places) or name in CHECKING:
            continue
        if any(fnmatch(name, pattern) for pattern in PREDICTING):
            predicting.append(name)
        elif name.startswith("harness/workloads/"):
            _, _, room, *inner = PurePath(name).parts
            if room not in APART or room in needed or SHARED.get("/".join([room, *inner])) in needed:
                run.append(name)
        else:
            (measuring if name.startswith("harness/") and name not in TOOLS else run).append(name)
    return Roles(tuple(run), tuple(measuring), tuple(predicting))


def _is_elsewhere(name: str, places: Collection[Place]) -> bool:
    """Return whether a file is written for a framework, or for a device, that none of the places has."""
    frameworks = {place.backend for place in places}
    if any(each in PurePath(name).stem.split("_") and each not in frameworks for each in ("torch", "jax")):
        return True
    path = ROOT / name
    device = DEVICE.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return device is not None and device[1] not in {place.device for place in places}


def _meaning(path: Path, aside: frozenset[str]) -> str | None:
    return _of_text(path.read_text(encoding="utf-8"), aside) if path.is_file() else None


def _meaning_of_blob(blob: str, aside: frozenset[str]) -> str | None:
    """Return what a file of the history does; None for one that was not there, whose number is all zeros."""
    source = _of_blob(blob)
    return None if source is None else _of_text(source, aside)


@cache
def _of_blob(blob: str) -> str | None:
    try:
        return facts.git(ROOT, "cat-file", "blob", blob)
    except subprocess.SubprocessError:
        return None


def _of_text(source: str, aside: frozenset[str] = frozenset()) -> str:
    """Return a digest of what a module does; of one that is no Python, as it may be half written, of its text."""
    return _digest(source, frozenset(name for name in aside if name in source))


@cache
def _digest(source: str, aside: frozenset[str]) -> str:
    try:
        meaning = _of_source(source, aside)
    except (SyntaxError, ValueError):
        meaning = source
    return hashlib.sha256(meaning.encode()).hexdigest()


def _of_source(source: str, aside: frozenset[str]) -> str:
    """Return the syntax tree of a module as text, without docstrings, places in the file, and what measures nothing.

    Nor has it the functions `aside`.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            doing = [each for each in body if not (_is_text(each) or _is_stated(each) or _refuses(each))]
            node.body = [  # type: ignore[attr-defined]
                each for each in doing if not (isinstance(each, ast.FunctionDef) and each.name in aside)
            ]
        if isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg not in STATED]
        if isinstance(node, ast.ImportFrom):
            node.names = [each for each in node.names if each.name != KNOBS]
    return ast.dump(tree)


def _refuses(node: ast.AST) -> bool:
    """Return whether a statement only refuses values: those that were measured have passed it."""
    if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1:
        error = node.body[0].exc if isinstance(node.body[0], ast.Raise) else None
        return isinstance(error, ast.Call) and isinstance(error.func, ast.Name) and error.func.id in REFUSALS
    function = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == KNOBS


def _is_stated(node: ast.AST) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id in STATED
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in STATED


def _is_text(node: ast.AST) -> bool:
    """Return whether a statement is a string alone: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
