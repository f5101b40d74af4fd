"""Digests of what decides a figure and has no version: the code of plugins, and the files of a corpus."""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from harness.contract.plugins import Plugins
from harness.machine import facts, history
from harness.workloads.data import sources

FROM_FILE = "harness_plugin_"
"""How the module of a plugin is named that was given as a file."""
END_BYTES = 1 << 20
"""How much of the beginning and of the end of a corpus's file is read."""
COUNTED = {"harness", *facts.PACKAGES, *sys.stdlib_module_names}
"""Packages that count by themselves: by the rooms that decide a figure, or by their version."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages that nobody works on."""
STRATEGIES, WORKLOADS = "harness_strategies", "harness_workloads"
"""The hooks by which plugins register what they offer."""


def of_code(plugins: Plugins) -> str:
    """Return the digest of all code that decides a figure: the deciding rooms of the harness, and the plugins."""
    known = [history.digests(history.TOOLS), of_plugins(plugins)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def of_plugins(plugins: Plugins) -> list[str]:
    """Return the digest of the code of each plugin, in an order of their own.

    A file has no version, and code that is worked on keeps its version.
    """
    modules = plugins.manager.get_plugins()
    return sorted(f"{module.__name__} {of_module(module)}" for module in modules)


def deciding(plugins: Plugins, hook: str, name: str, form: Callable[..., Any]) -> list[ModuleType]:
    """Return the modules whose code makes a form of a strategy or a workload: where it is written and registered.

    A package may register what its modules offer: then the innermost of these around the form has registered it. Of a
    module within a group all of the group counts.
    """
    registering = _registering(plugins.manager)[hook, name]
    written = history.written(form).__module__
    if written == registering.__name__:  # another file of this name may have come later
        return [_group(registering)]
    around = written
    while around.startswith(f"{registering.__name__}.") and not hasattr(sys.modules.get(around), hook):
        around = around.rpartition(".")[0]
    if around.startswith(f"{registering.__name__}."):
        registering = sys.modules[around]
    modules = [registering] + ([sys.modules[written]] if written in sys.modules else [])
    return list(dict.fromkeys(map(_group, modules)))


@lru_cache(maxsize=1)
def _registering(manager: pluggy.PluginManager) -> dict[tuple[str, str], ModuleType]:
    """Return the module that registered each strategy and each workload, by the hook and the name."""
    return {
        (hook, item.name): implementation.plugin
        for hook in (STRATEGIES, WORKLOADS)
        for implementation in getattr(manager.hook, hook).get_hookimpls()
        for item in implementation.function()
    }


def _group(module: ModuleType) -> ModuleType:
    """Return the package that a module shares code with: the one around it, unless that is the outermost."""
    around = module.__name__.rpartition(".")[0]
    return sys.modules.get(around, module) if "." in around else module


def of_module(module: ModuleType | None) -> str:
    """Return the digest of a module's code as its files are now: of its file, and of its folder within a package.

    A plugin that was given as a file, and a module that is in no package, is that file, and what it imports that is not
    installed; whatever else lies beside it does not count.
    """
    if module is None or getattr(module, "__file__", None) is None:
        return ""
    path = Path(str(module.__file__))
    in_package = "." in module.__name__ or path.name == "__init__.py"
    alone = module.__name__.startswith(FROM_FILE) or not in_package
    return of_files(_with_imports(path) if alone else path.parent.rglob("*.py"))


def _with_imports(path: Path) -> set[Path]:
    """Return a file, and those of what it imports, directly or through another file, that is not installed."""
    files, left = {path}, [path]
    while left:
        homes = {home for name in _imported(left.pop()) if (home := _home(name)) is not None}
        for home in homes - files:
            files.add(home)
            if home.is_dir():
                files |= set(home.rglob("*.py"))
            else:
                left.append(home)
    return files


def _imported(file: Path) -> set[str]:
    """Return the outermost packages that a file imports, within functions too; none for what is no Python."""
    names: set[str] = set()
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _home(name: str) -> Path | None:
    """Return the file of a module, or the folder of a package; None where it counts by itself or is installed."""
    if name in COUNTED:
        return None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a module that was made by hand has no place
        return None
    place = next(iter(spec.submodule_search_locations or ()), spec.origin) if spec is not None else None
    if place is None or INSTALLED.intersection(Path(place).parts) or not Path(place).exists():
        return None
    return Path(place)


def of_files(paths: Iterable[Path]) -> str:
    """Return the digest of the names and the contents of files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):  # a link may lead nowhere
        digest.update(os.fsencode(path.name) + path.read_bytes())
    return digest.hexdigest()


def of_corpus(name: str, root: Path) -> str:
    """Return the digest of the files of a corpus; nothing for one that is generated or comes with Python.

    Of each file these are the size, the time of its last change and both ends: to read all of it may take minutes.
    """
    if name in ("standard_library", "zipf"):
        return ""
    try:
        corpus = sources.resolve(name, root)
    except sources.CorpusError:  # generated, or refused where it is prepared
        return ""
    labels = [path.with_suffix(".labels.npy") for path in corpus.files if corpus.kind == "npy"]
    digest = hashlib.sha256()
    for path in (*corpus.files, *(each for each in labels if each.is_file())):
        known = path.stat()
        digest.update(os.fsencode(f"{path.name} {known.st_size} {known.st_mtime_ns} "))
        with path.open("rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(0, known.st_size - END_BYTES))
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()
