"""Compare memory strategies: a plugin author's whole world, and the door to results.

import harness

harness.read("results").frame()        # a data frame: one row a strategy
harness.read("results").records()      # one row a record
harness.predict("long_context").frame()
harness.run("smoke").frame()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.contract import plugins
    from harness.contract.data import IGNORED, Documents, Extent, Holding, Source, Windows
    from harness.contract.hooks import hookimpl
    from harness.contract.objective import Objective
    from harness.contract.parts import BESIDE, Division, Parts
    from harness.contract.place import Place
    from harness.contract.strategy import Strategy, Unpredictable
    from harness.contract.toolkit import checkpoints, knobs, mapped_files, mesh, optimizers, rows_on_disk, update_rules
    from harness.contract.toolkit import trees as tree
    from harness.contract.toolkit.memory import available_bytes
    from harness.contract.toolkit.rows_on_disk import RowsOnDisk
    from harness.contract.toolkit.turns import alike
    from harness.contract.workload import Workload
    from harness.report import door as door
    from harness.report.door import predict, read, run
    from harness.workloads.user_model import Sizes, of_jax, of_torch

__all__ = [
    "BESIDE",
    "IGNORED",
    "Division",
    "Documents",
    "Extent",
    "Holding",
    "Objective",
    "Parts",
    "Place",
    "RowsOnDisk",
    "Sizes",
    "Source",
    "Strategy",
    "Unpredictable",
    "Windows",
    "Workload",
    "alike",
    "available_bytes",
    "checkpoints",
    "hookimpl",
    "knobs",
    "mapped_files",
    "mesh",
    "of_jax",
    "of_torch",
    "optimizers",
    "plugins",
    "predict",
    "read",
    "rows_on_disk",
    "run",
    "tree",
    "update_rules",
]
__version__ = "0.4.0"
MODULES = {
    **{name: f"harness.contract.toolkit.{name}" for name in ("checkpoints", "knobs", "mapped_files", "mesh")},
    **{name: f"harness.contract.toolkit.{name}" for name in ("optimizers", "rows_on_disk", "update_rules")},
    "door": "harness.report.door",
    "plugins": "harness.contract.plugins",
    "run": "harness.run",
    "tree": "harness.contract.toolkit.trees",
}
"""The names that are modules."""
HOMES = {
    "harness.contract.data": ("IGNORED", "Documents", "Extent", "Holding", "Source", "Windows"),
    "harness.contract.hooks": ("hookimpl",),
    "harness.contract.objective": ("Objective",),
    "harness.contract.parts": ("BESIDE", "Division", "Parts"),
    "harness.contract.place": ("Place",),
    "harness.contract.strategy": ("Strategy", "Unpredictable"),
    "harness.contract.toolkit.memory": ("available_bytes",),
    "harness.contract.toolkit.rows_on_disk": ("RowsOnDisk",),
    "harness.contract.toolkit.turns": ("alike",),
    "harness.contract.workload": ("Workload",),
    "harness.report.door": ("predict", "read"),
    "harness.workloads.user_model": ("Sizes", "of_jax", "of_torch"),
}
"""The modules of all other names."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: what needs a few of them does not wait for all."""
    if name in MODULES:
        value: Any = importlib.import_module(MODULES[name])
    elif home := next((home for home, names in HOMES.items() if name in names), None):
        value = getattr(importlib.import_module(home), name)
    else:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    globals()[name] = value
    return value
