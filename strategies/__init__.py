"""The strategies that come with the harness: one file each, in folders by what they rewrite, found by being here."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from harness import Strategy, hookimpl


@hookimpl
def harness_strategies() -> list[Strategy]:
    """Collect what every module of these folders offers."""
    return [strategy for module in _modules(__name__) for strategy in module.harness_strategies()]


def _modules(package: str) -> Iterator[ModuleType]:
    """Yield the modules and packages that offer strategies; folders of such are walked, what is private is not."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if found.name.startswith("_"):
            continue
        name = f"{package}.{found.name}"
        module = importlib.import_module(name)
        if hasattr(module, "harness_strategies"):
            yield module
        elif found.ispkg:
            yield from _modules(name)
