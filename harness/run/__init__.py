"""One whole run of a plan: its order, processes, files and locks. Called, it measures a suite: `harness.run(suite)`."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is also the verb of its name, since both are `harness.run`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Measure a suite; see `harness.report.door.run`."""
        import harness

        return harness.door.run(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
