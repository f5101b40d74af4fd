"""Load the plugins, check what they offer, and answer a misspelt name with the nearest right one."""

import difflib
import importlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pluggy

from harness.contract import hooks, place
from harness.contract.data import DATA, FEEDS
from harness.contract.errors import raised
from harness.contract.parts import PART_NAMES
from harness.contract.strategy import Strategy
from harness.contract.workload import Workload
from harness.refusal import Refusal

GROUP = "harness"
T = TypeVar("T", Strategy, Workload)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_NAMES = 60
"""How many known names a refusal lists."""
ALIKE = 0.8
"""From which share of what two names have in common on one is taken for the other, mistyped."""
LEAST_PART = 4
"""Letters that a name has, at least, which is looked for within others."""

KNOB = (
    ", as in `every: int = 2`: bool, int, float or str, written as types (which `from __future__ import annotations` "
    "makes texts)"
)
"""What a knob is, after what is wrong with one."""


class PluginError(Refusal):
    """A plugin that cannot be used, in one sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


@dataclass(frozen=True)
class Plugins:
    """The strategies and workloads of all plugins by name, and the versions of the distributions they come from."""

    manager: pluggy.PluginManager
    strategies: Mapping[str, Strategy]
    workloads: Mapping[str, Workload]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def aliases(self) -> dict[str, str]:
        """The strategy that each former name means."""
        return {alias: strategy.name for strategy in self.strategies.values() for alias in strategy.aliases}


def load(extra: Sequence[str] = ()) -> Plugins:
    """Load the plugins of all entry points, and those in `extra` (a module, or a `.py` file).

    Raises PluginError for a plugin that cannot be imported, that raises, or that offers something unusable.
    """
    with _threads_as_daemons(), redirect_stdout(sys.stderr):  # what a plugin prints is not what a command answers
        return _loaded(extra)


@contextmanager
def _threads_as_daemons() -> Iterator[None]:
    """Make daemons of the threads that start meanwhile: at its end a command would wait for all others."""
    start = threading.Thread.start

    def start_as_daemon(thread: threading.Thread) -> None:
        if thread.ident is None:
            thread.daemon = True
        start(thread)

    threading.Thread.start = start_as_daemon  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def _loaded(extra: Sequence[str]) -> Plugins:
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hooks)
    versions = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        _register(manager, _imported(point.value, point.value), point.name)
        if point.dist is not None:
            versions[point.dist.name] = point.dist.version
    for name in extra:
        if manager.has_plugin(name):
            raise PluginError(f"plugin '{name}' is named twice: name it once")
        module = _from_path(Path(name)) if name.endswith(".py") else _imported(name, name)
        if manager.is_registered(module):
            raise PluginError(f"plugin '{name}' is installed already: leave it out")
        _register(manager, module, name)
    return Plugins(
        manager,
        _by_name(manager, "harness_strategies", Strategy),
        _by_name(manager, "harness_workloads", Workload),
        versions,
    )


def named(names: Sequence[str]) -> tuple[Plugins, list[str], tuple[str, ...]]:
    """Load plugins by the name of a distribution, an entry point, a module or a file.

    Returns all plugins, the registered names of those that were asked for, and the names that were not installed.
    """
    installed: dict[str, list[str]] = {}
    for point in entry_points(group=GROUP):
        for name in {point.name, point.value, point.dist.name if point.dist is not None else point.name}:
            installed.setdefault(name, []).append(point.name)
    extra = tuple(name for name in names if name not in installed)
    loaded = load(extra)
    asked = [registered for name in names for registered in sorted(installed.get(name, [name]))]
    return loaded, list(dict.fromkeys(asked)), extra


def _register(manager: pluggy.PluginManager, module: ModuleType, name: str) -> None:
    try:
        manager.register(module, name)
    except (ValueError, pluggy.PluginValidationError) as error:  # a name or module that is there; a hook's arguments
        reason = str(error).strip().splitlines()[-1]
        raise PluginError(f"plugin '{name}' cannot be registered ({reason}): mend or remove it") from None


def _imported(module: str, name: str) -> ModuleType:
    if Path(module).is_file():
        raise PluginError(f"plugin '{name}' is a file whose name does not end in .py: give one that does, or a module")
    if Path(module).is_dir() and not module.isidentifier():  # a package may lie in a folder of its name
        raise PluginError(f"plugin '{name}' is a folder: give a .py file or the name of a module")
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin '{name}' cannot be imported ({raised(error)}): mend or remove it") from None


def _from_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"harness_plugin_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PluginError(f"there is no plugin file '{path}': give the path of a .py file or a module's name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin '{path}' raises when loaded ({raised(error)}): mend it") from None
    return module


def _by_name(manager: pluggy.PluginManager, hook: str, kind: type[T]) -> dict[str, T]:
    by_name: dict[str, T] = {}
    taken: set[str] = set()
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = implementation.plugin_name
        try:
            returned = implementation.function()
            offered = list(returned) if isinstance(returned, Iterable) else None
        except (Exception, SystemExit) as error:
            raise PluginError(f"plugin '{plugin}' raises in {hook} ({raised(error)}): mend it") from None
        if offered is None:
            what = f"returns a {type(returned).__name__}" if returned is not None else "returns nothing"
            raise PluginError(f"plugin '{plugin}' {what} from {hook}: return a list of {kind.__name__}")
        for item in offered:
            _refuse_unusable(item, kind, plugin)
            aliases: tuple[str, ...] = getattr(item, "aliases", ())
            for name in (item.name, *aliases):
                if name in taken:
                    raise PluginError(f"plugin '{plugin}' offers '{name}', a name that is taken: choose another")
                taken.add(name)
            by_name[item.name] = item
    return dict(sorted(by_name.items()))


def _refuse_unusable(item: object, kind: type, plugin: str) -> None:
    if not isinstance(item, kind):
        raise PluginError(f"plugin '{plugin}' offers a {type(item).__name__} where a {kind.__name__} is wanted")
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PluginError(f"plugin '{plugin}' offers the name {name!r}: use letters, digits, '.', '_' and '-'")
    if isinstance(item, Strategy):
        if not isinstance(item.rewrites, tuple):
            raise PluginError(f"strategy '{name}' of plugin '{plugin}': `rewrites` is not a tuple of names: give one")
        unknown = [part for part in item.rewrites if part not in PART_NAMES]
        if unknown:
            raise PluginError(
                f"strategy '{name}' of plugin '{plugin}' rewrites '{unknown[0]}'{nearest(unknown[0], PART_NAMES)}"
            )
        for field, value, known in (
            ("feeds", item.feeds, FEEDS),
            ("data", item.data, (None, *DATA)),
        ):
            if value not in known:
                hint = nearest(str(value), [each for each in known if each])
                raise PluginError(f"strategy '{name}' of plugin '{plugin}': `{field}` is {value!r}{hint}")
        try:
            silent = not isinstance(item.about, str) or not item.summary
        except Exception as error:
            reason = f"raises when asked about itself ({raised(error)})"
            raise PluginError(f"strategy '{name}' of plugin '{plugin}' {reason}: mend it") from None
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
        if not isinstance(item.aliases, tuple) or not all(NAME.fullmatch(str(alias)) for alias in item.aliases):
            raise PluginError(f"strategy '{name}' of plugin '{plugin}': `aliases` is not a tuple of names: give one")
        try:
            item.knobs  # noqa: B018 - reading them checks them
        except (TypeError, ValueError) as error:
            form = KNOB if isinstance(error, TypeError) else ""
            raise PluginError(f"strategy '{name}' of plugin '{plugin}': {error}{form}") from None


def printable(text: str) -> str:
    """Make text safe for a terminal: one line, control characters shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_part(one: str, other: str) -> bool:
    """Check whether the words of one name stand in the other, as `autocast` in `bfloat16_autocast`."""
    shorter, longer = sorted((one.lower(), other.lower()), key=len)
    return len(shorter) >= LEAST_PART and re.search(rf"(^|[_-]){re.escape(shorter)}", longer) is not None


def nearest(name: str, names: Iterable[str], likeness: float = 0.5) -> str:
    """Return `; did you mean 'x'?`, or a list of the known names where none is near; of many, the first.

    Near is what has so much in common, from 0 to 1; before what has little, a name that is a part of the other.
    """
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=max(likeness, ALIKE))
    close = close or sorted((each for each in names if _is_part(each, name)), key=len)[-1:]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=likeness)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"; there is {', '.join(names[:MOST_NAMES])}{more}"
