"""Find the plugins, take what they offer, and answer misspelt names with the nearest right one."""

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pluggy

from harness.contract import hooks, place
from harness.contract.parts import PART_NAMES
from harness.contract.strategy import Strategy
from harness.contract.workload import Workload

GROUP = "harness"
T = TypeVar("T", Strategy, Workload)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PluginError(Exception):
    """A plugin that cannot be used, in one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


@dataclass(frozen=True)
class Plugins:
    """What all plugins offer, by name, and the versions of the distributions they came in."""

    manager: pluggy.PluginManager
    strategies: Mapping[str, Strategy]
    workloads: Mapping[str, Workload]
    versions: Mapping[str, str] = field(default_factory=dict)


def load(extra: Sequence[str] = ()) -> Plugins:
    """Load the plugins of all entry points and those named (a module, or a `.py` file).

    Raises PluginError for one that cannot be imported, raises, or offers something unusable.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hooks)
    versions = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        manager.register(_imported(point.value, point.value), point.name)
        if point.dist is not None:
            versions[point.dist.name] = point.dist.version
    for name in extra:
        if manager.has_plugin(name):
            raise PluginError(f"plugin '{name}' is named twice: name it once")
        module = _from_path(Path(name)) if name.endswith(".py") else _imported(name, name)
        if manager.is_registered(module):
            raise PluginError(f"plugin '{name}' is installed already: leave it out")
        manager.register(module, name)
    return Plugins(
        manager,
        _by_name(manager, "harness_strategies", Strategy),
        _by_name(manager, "harness_workloads", Workload),
        versions,
    )


def named(names: Sequence[str]) -> tuple[Plugins, list[str], tuple[str, ...]]:
    """Load plugins that may be installed already, by distribution, entry point or module, or else are files or modules.

    Returns all plugins, the names under which those asked for are registered, and the ones that were not installed.
    """
    installed: dict[str, list[str]] = {}
    for point in entry_points(group=GROUP):
        for known in {point.name, point.value, point.dist.name if point.dist is not None else point.name}:
            installed.setdefault(known, []).append(point.name)
    extra = tuple(name for name in names if name not in installed)
    loaded = load(extra)
    asked = [registered for name in names for registered in sorted(installed.get(name, [name]))]
    return loaded, list(dict.fromkeys(asked)), extra


def _imported(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise PluginError(
            f"plugin '{name}' cannot be imported ({type(error).__name__}: {error}): mend or remove it"
        ) from None


def _from_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"harness_plugin_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PluginError(f"there is no plugin file '{path}': give the path of a .py file or a module's name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PluginError(f"plugin '{path}' raises when loaded ({type(error).__name__}: {error}): mend it") from None
    return module


def _by_name(manager: pluggy.PluginManager, hook: str, kind: type[T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = implementation.plugin_name
        try:
            offered = list(implementation.function())
        except Exception as error:
            raise PluginError(f"plugin '{plugin}' raises in {hook} ({type(error).__name__}: {error})") from None
        for item in offered:
            _refuse_unusable(item, kind, plugin)
            if item.name in found:
                raise PluginError(f"plugin '{plugin}' offers '{item.name}', a name that is taken: choose another")
            found[item.name] = item
    return dict(sorted(found.items()))


def _refuse_unusable(item: object, kind: type, plugin: str) -> None:
    if not isinstance(item, kind):
        raise PluginError(f"plugin '{plugin}' offers a {type(item).__name__} where a {kind.__name__} is wanted")
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PluginError(f"plugin '{plugin}' offers the name {name!r}: use letters, digits, '.', '_' and '-'")
    if isinstance(item, Strategy):
        unknown = [part for part in item.rewrites if part not in PART_NAMES]
        if unknown:
            raise PluginError(
                f"strategy '{name}' of plugin '{plugin}' rewrites '{unknown[0]}'{nearest(unknown[0], PART_NAMES)}"
            )
        try:
            silent = not isinstance(item.about, str) or not item.summary
        except Exception as error:
            told = f"raises when asked about itself ({type(error).__name__}: {error})"
            raise PluginError(f"strategy '{name}' of plugin '{plugin}' {told}: mend it") from None
        if silent:
            raise PluginError(f"strategy '{name}' of plugin '{plugin}' says nothing about itself: give `about`")
        if not isinstance(item.on, Mapping) or not all(map(callable, item.on.values())):
            raise PluginError(
                f"strategy '{name}' of plugin '{plugin}': `on` maps a backend to something that is not a callable"
            )
        strange = [backend for backend in item.on if backend not in place.NAMES]
        if strange:
            hint = nearest(str(strange[0]), place.NAMES)
            raise PluginError(f"strategy '{name}' of plugin '{plugin}' is for the backend '{strange[0]}'{hint}")
        try:
            item.knobs  # noqa: B018 - reading them checks them
        except (TypeError, ValueError) as error:
            raise PluginError(f"strategy '{name}' of plugin '{plugin}': {error}") from None


def printable(text: str) -> str:
    """Make text safe for a terminal: one line, control characters shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say `; did you mean 'x'?`, or what there is when nothing is near."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; there is {', '.join(known)}"
