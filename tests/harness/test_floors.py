"""A module imports only from floors below, the harness no strategy, the command line no framework."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"torch", "torchvision", "triton", "jax", "jaxlib", "flax", "optax", "numpy", "tokenizers"}
STANDARD = set(sys.stdlib_module_names)

# Lowest first. A package stands for all its modules, unless they are named themselves; "" is `harness/__init__.py`.
FLOORS = (
    (
        "types",
        "tree",
        "corpus",
        "strict_yaml",
        "statistics",
        "numerics",
        "hooks",
        "quiet",
        "backends",
        "backends.driver",
        "objective",
        "npy",
        "work",
        "sizes",
    ),
    ("", "tokens", "frames", "meters", "plugins", "machine", "train", "updates", "keeper"),
    ("records", "instruments", "workloads"),
    ("suite", "environment", "assembly", "scratch"),
    ("schedule", "corpora", "locks"),
    (
        "backends.torch",
        "backends.jax",
        "backends.live_storage",
        "backends.torch_work",
        "backends.jax_work",
        "worker",
        "runner",
        "judge",
    ),
    ("rates", "forecasts", "doctor", "claims", "changes", "contract"),
    ("planner", "documents"),
    ("campaign", "fit"),
    ("advise", "remote"),
    ("report", "cluster"),
    ("progress",),
    ("cli", "pytest_plugin"),
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


def floor_of(module: str) -> int:
    """Find the floor of a module of the harness: its own, or that of the package it is in."""
    name = module.removeprefix("harness").removeprefix(".")
    while True:
        for number, floor in enumerate(FLOORS):
            if name in floor:
                return number
        assert "." in name, f"{module} has no floor: give it one"
        name = name.rpartition(".")[0]


def package_of(module: str) -> str:
    """Name the package a module is private to: `harness.worker` for all its modules, else the module itself."""
    return ".".join(module.split(".")[:2])


def climbs(module: str, imported: str) -> bool:
    """Say whether an import within the harness goes up, or sideways to another package."""
    own, other = floor_of(module), floor_of(imported)
    return other > own or (other == own and package_of(module) != package_of(imported))


@pytest.mark.parametrize("module", HARNESS)
def test_a_module_imports_only_from_below(module: str) -> None:
    floor_of(module)
    for found in imports(HARNESS[module].read_text(), HARNESS):
        top = found.module.partition(".")[0]
        assert top != "strategies", f"{module}:{found.line} knows a strategy"
        if top != "harness" or found.for_types:
            continue
        # A package hands over to its modules only where it is called, as the two forms of a workload.
        own_module = found.inside and found.module.startswith(f"{module}.")
        assert own_module or not climbs(module, found.module), f"{module}:{found.line} imports {found.module}"


def test_every_floor_is_inhabited() -> None:
    inhabited = {name.removeprefix("harness").removeprefix(".") for name in HARNESS}
    named = {name for floor in FLOORS for name in floor}
    assert named <= inhabited
    assert sum(map(len, FLOORS)) == len(named), "a module is on two floors"


def test_no_two_modules_of_one_floor_import_each_other() -> None:
    known = {(a, b) for a in HARNESS for b in (i.module for i in imports(HARNESS[a].read_text(), HARNESS))}
    both = {(a, b) for a, b in known if a < b and (b, a) in known}
    # The only pairs: a package whose functions import the form they hand over to.
    assert all(b.startswith(f"{a}.") for a, b in both), both


@pytest.mark.parametrize(
    ("module", "imported", "expected"),
    [
        ("harness.types", "harness.hooks", True),
        ("harness.judge", "harness.campaign", True),
        ("harness.judge", "harness.report.table", True),
        ("harness.tokens", "harness.records", True),
        ("harness.plugins", "harness.suite", True),
        ("harness.types", "harness.statistics", True),
        ("harness.worker.kinds", "harness.judge", True),
        ("harness.backends", "harness.backends.torch", True),
        ("harness.worker.speed", "harness.worker.memory", False),
        ("harness.records", "harness.tokens", False),
        ("harness.cli", "harness.types", False),
    ],
)
def test_what_climbs(module: str, imported: str, expected: bool) -> None:
    assert climbs(module, imported) is expected


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
from typing import TYPE_CHECKING
import harness.suite, json
if TYPE_CHECKING:
    from harness.records import Record
else:
    from harness import judge
def f():
    class C:
        from harness import cli, __version__
"""
    found = [i for i in imports(source, HARNESS) if i.module.startswith("harness")]
    assert found == [
        Import("harness.suite", 3, False, False),
        Import("harness.records", 5, False, True),
        Import("harness.judge", 7, False, False),
        Import("harness.cli", 10, True, False),
        Import("harness", 10, True, False),
    ]


AUTHORS_WORLD = {"harness", "harness.npy", "harness.tree", "harness.updates"}


@pytest.mark.parametrize("module", STRATEGIES)
def test_a_strategy_imports_the_harness_and_nothing_of_it(module: str) -> None:
    for found in imports(STRATEGIES[module].read_text(), STRATEGIES | HARNESS):
        top, where = found.module.partition(".")[0], f"{module}:{found.line}"
        if top == "harness":
            assert found.module in AUTHORS_WORLD, f"{where} imports {found.module}, which is not for plugins"
        elif top == "strategies":  # one that chooses among others, or is made of one, asks for it when it is applied
            same = package_of(found.module) == package_of(module)
            assert same or found.inside, f"{where} needs another strategy before it is applied"
        elif top not in STANDARD:
            private = module.endswith((".on_torch", ".on_jax")) and module.count(".") > 1
            assert found.inside or private or found.for_types, f"{where} imports {top} before it is used"


LIGHT = """
import json, sys
import harness.cli, harness.campaign, harness.judge, harness.report.table
from harness import plugins
loaded = plugins.load()
for strategy in loaded.strategies.values():
    strategy.knobs, strategy.summary
    from harness.types import Place
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
