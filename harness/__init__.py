"""Compare memory strategies: a plugin author's whole world."""

from typing import TYPE_CHECKING, Any

from harness.contract.data import IGNORED, Documents, Extent, Held, Source, Windows
from harness.contract.hooks import hookimpl
from harness.contract.objective import Objective
from harness.contract.parts import Division, Parts
from harness.contract.place import Place
from harness.contract.strategy import Strategy
from harness.contract.toolkit import optimizers, rows_on_disk, update_rules
from harness.contract.toolkit import trees as tree
from harness.contract.toolkit.rows_on_disk import RowsOnDisk
from harness.contract.toolkit.turns import alike
from harness.contract.workload import Workload

if TYPE_CHECKING:
    from harness.contract import plugins
    from harness.workloads.user_model import Sizes, of_jax, of_torch

__all__ = [
    "IGNORED",
    "Division",
    "Documents",
    "Extent",
    "Held",
    "Objective",
    "Parts",
    "Place",
    "RowsOnDisk",
    "Sizes",
    "Source",
    "Strategy",
    "Windows",
    "Workload",
    "alike",
    "hookimpl",
    "of_jax",
    "of_torch",
    "optimizers",
    "plugins",
    "rows_on_disk",
    "tree",
    "update_rules",
]
__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    """Import what a strategy does not need when it is asked for."""
    if name in ("Sizes", "of_torch", "of_jax"):
        from harness.workloads import user_model

        return getattr(user_model, name)
    if name == "plugins":
        from harness.contract import plugins

        return plugins
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
