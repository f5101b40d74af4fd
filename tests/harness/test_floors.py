"""A module imports only from floors below, the harness no strategy, the command line no framework."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"torch", "torchvision", "triton", "jax", "jaxlib", "flax", "optax", "numpy", "tokenizers"}
STANDARD = set(sys.stdlib_module_names)

# Lowest first: a room imports only from floors below its own, or from within itself. What stands beside the rooms is
# the door: `harness/__init__.py`, a plugin author's whole world, is of the contract, `harness/__main__.py` of the cli,
# and `harness/refusal.py`, which every room may raise, of the lowest floor.
ROOMS = {
    "records": "cases, tasks and records: what travels between processes and into files",
    "contract": "parts, strategies and workloads, plugins, the only loop, tools for authors",
    "backends": "torch and JAX: a step, its peak, its prediction",
    "workloads": "decoder, temporal, scoring, a user's model; the rows that they read",
    "suite": "YAML to groups of cases",
    "machine": "what this machine is, the memory of a process, what would spoil figures",
    "verdicts": "records to verdicts: the ladder of answers, effects in time, claims",
    "worker": "one task in a process of its own",
    "run": "one whole run of a plan: its order, processes, files and locks",
    "verbs": "what each verb answers, as values",
    "report": "records and answers as text, tables, pictures and a page",
    "cli": "the verbs as commands, progress on the screen, suites as tests",
}
FLOORS = (
    ("records",),
    ("contract",),
    ("backends", "workloads"),
    ("suite", "machine"),
    ("verdicts",),
    ("worker", "run"),
    ("verbs",),
    ("report",),
    ("cli",),
)


class Import(NamedTuple):
    """One imported module, where, and how deep: within a function, or for the type checker alone."""

    module: str
    line: int
    inside: bool
    for_types: bool


def modules(folder: Path) -> dict[str, Path]:
    """Name every module below a package: `harness.backends.torch`, or the package itself."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


HARNESS, STRATEGIES = modules(ROOT / "harness"), modules(ROOT / "strategies")


def imports(source: str, known: "dict[str, Path]", inside: bool = False) -> Iterator[Import]:
    """List what a module imports; `from harness import judge` imports `harness.judge`, where that is a module."""
    yield from _imports(ast.parse(source), known, inside, False)


def _imports(node: ast.AST, known: "dict[str, Path]", inside: bool, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, inside, for_types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: write imports in full"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield Import(whole if whole in known else str(node.module), node.lineno, inside, for_types)
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    checked = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _imports(child, known, inside, for_types or (checked and name == "body"))


def room_of(module: str) -> str:
    """Name the room of a module of the harness."""
    name = module.removeprefix("harness").removeprefix(".").partition(".")[0]
    return {"": "contract", "__main__": "cli", "refusal": "records"}.get(name, name)


def floor_of(room: str) -> int:
    """Find the floor of a room, counted from 1."""
    return next(number for number, rooms in enumerate(FLOORS, 1) if room in rooms)


def climbs(module: str, imported: str) -> bool:
    """Say whether an import within the harness goes up, or sideways into another room."""
    own, other = room_of(module), room_of(imported)
    return own != other and floor_of(other) >= floor_of(own)


def floors() -> str:
    """Draw the floors, highest first, as CONTRIBUTING shows them."""
    rows = [
        f"{floor_of(room)}  {room:<11}{what}".rstrip()
        for rooms in reversed(FLOORS)
        for room in rooms
        for what in [ROOMS[room]]
    ]
    return "\n".join(rows)


def faults(modules: "dict[str, Path]", known: "dict[str, Path]", fault: "Callable[[str, Import], str]") -> list[str]:
    """Return what is wrong with the imports of all modules; `fault` says it of one, or nothing."""
    sentences = []
    for module, path in modules.items():
        try:
            answers = [(each.line, fault(module, each)) for each in imports(path.read_text(), known)]
        except AssertionError as error:
            answers = [(0, str(error))]
        sentences += [f"{module}:{line} {words}" for line, words in answers if words]
    return sentences


def test_a_module_imports_only_from_below() -> None:
    def fault(module: str, found: Import) -> str:
        top = found.module.partition(".")[0]
        if top == "strategies":
            return "knows a strategy"
        if top != "harness" or found.for_types or (module == "harness" and found.inside):
            return ""
        return f"imports {found.module}" if climbs(module, found.module) else ""

    assert len(HARNESS) > 100
    assert not (wrong := faults(HARNESS, HARNESS, fault)), "\n".join(wrong)


def test_every_room_has_a_floor_and_is_inhabited() -> None:
    assert {room_of(name) for name in HARNESS} == set(ROOMS) == {room for rooms in FLOORS for room in rooms}
    assert sum(map(len, FLOORS)) == len(ROOMS), "a room is on two floors"


def test_the_floors_are_written_down_once() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert floors() in text, f"write this into CONTRIBUTING.md:\n{floors()}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """At import time; a package whose functions import the form that they hand over to is none."""
    arrows = {
        name: {i.module for i in imports(path.read_text(), HARNESS) if not i.inside and not i.for_types} & set(HARNESS)
        for name, path in HARNESS.items()
    }
    assert not (circle := sorted(_unresolved(arrows))), f"among these: {circle}"


def _unresolved(arrows: dict[str, set[str]]) -> set[str]:
    """Take away modules that import nothing of what is left, until no more can go."""
    left = dict(arrows)
    while ready := [name for name, needs in left.items() if not (needs - {name}) & left.keys()]:
        for name in ready:
            del left[name]
    return set(left)


@pytest.mark.parametrize(
    ("module", "imported", "expected"),
    [
        ("harness.contract.parts", "harness.suite.plan", True),
        ("harness.verdicts.judge", "harness.run.session", True),
        ("harness.verdicts.judge", "harness.report.table", True),
        ("harness.records.case", "harness", True),
        ("harness.worker.tasks", "harness.run.runner", True),
        ("harness.backends", "harness.workloads", True),
        ("harness.worker.timing", "harness.worker.memory", False),
        ("harness.workloads.data.tokens", "harness.records.task", False),
        ("harness.__main__", "harness.cli.commands", False),
    ],
)
def test_what_climbs(module: str, imported: str, expected: bool) -> None:
    assert climbs(module, imported) is expected


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
from typing import TYPE_CHECKING
import harness.suite.plan, json
if TYPE_CHECKING:
    from harness.records import Record
else:
    from harness.verdicts import judge
def f():
    class C:
        from harness import cli, __version__
"""
    found = [i for i in imports(source, HARNESS) if i.module.startswith("harness")]
    assert found == [
        Import("harness.suite.plan", 3, False, False),
        Import("harness.records", 5, False, True),
        Import("harness.verdicts.judge", 7, False, False),
        Import("harness.cli", 10, True, False),
        Import("harness", 10, True, False),
    ]


def group_of(module: str) -> str:
    """Name the group of a strategy's module: `strategies.loss` for all below it, or the module itself."""
    return ".".join(module.split(".")[:2])


def test_a_strategy_imports_the_harness_and_its_own_group() -> None:
    def fault(module: str, found: Import) -> str:
        top = found.module.partition(".")[0]
        if top == "harness":
            return "" if found.module == "harness" else f"imports {found.module}: write `from harness import ...`"
        if top == "strategies":
            return "" if group_of(found.module) == group_of(module) else f"imports {found.module}, of another group"
        private = module.rpartition(".")[2].startswith("_")
        allowed = top in STANDARD or found.inside or private or found.for_types
        return "" if allowed else f"imports {top} before it is used"

    assert len(STRATEGIES) > 100
    assert not (wrong := faults(STRATEGIES, STRATEGIES | HARNESS, fault)), "\n".join(wrong)


LIGHT = """
import json, sys
import harness.cli.run, harness.run.session, harness.verdicts.judge, harness.report.table
from harness import plugins
loaded = plugins.load()
for strategy in loaded.strategies.values():
    strategy.knobs, strategy.summary
    from harness import Place
    strategy.obstacle(Place("torch", "cpu"))
found = sorted(sys.modules)
print(json.dumps([sorted(loaded.strategies), sorted(loaded.workloads), found]))
"""


def test_the_parent_process_loads_no_framework(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    strategies, workloads, loaded = json.loads(done.stdout)
    assert {"nothing", "checkpoint", "fused_loss"} <= set(strategies)
    assert "decoder" in workloads
    assert not FRAMEWORKS & {name.partition(".")[0] for name in loaded}
