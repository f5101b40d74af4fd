"""The strategies that come with the harness: one file each, found by being here."""

import importlib
import pkgutil

from harness import Strategy, hookimpl


@hookimpl
def harness_strategies() -> list[Strategy]:
    """Collect what every module of this folder offers."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [strategy for module in modules for strategy in module.harness_strategies()]
