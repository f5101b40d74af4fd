"""The strategies that come with the harness.

Each strategy is one module or package, in a folder named for what it rewrites. Every module here is found by walking
the folders; nothing is registered by hand. The docstring of a folder introduces what its modules share, that of a
module is what `harness show` prints.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from harness import Strategy, hookimpl


@hookimpl
def harness_strategies() -> list[Strategy]:
    """Return the strategies of every module in these folders."""
    return [strategy for module in _modules(__name__) for strategy in module.harness_strategies()]


def _modules(package: str) -> Iterator[ModuleType]:
    """Yield the modules and packages that offer strategies, from all folders but private ones."""
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.name.startswith("_"):
            continue
        name = f"{package}.{info.name}"
        module = importlib.import_module(name)
        if hasattr(module, "harness_strategies"):
            yield module
        elif info.ispkg:
            yield from _modules(name)
