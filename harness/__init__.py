"""Compare memory strategies: a plugin author's whole world, and the door to results.

import harness

harness.read("results").frame()        # a data frame: one row a strategy
harness.read("results").records()      # one row a record
harness.predict("long_context").frame()
harness.run("smoke").frame()
"""

import importlib
from typing import TYPE_CHECKING, Any

from harness.contract.data import IGNORED, Documents, Extent, Holding, Source, Windows
from harness.contract.hooks import hookimpl
from harness.contract.objective import Objective
from harness.contract.parts import BESIDE, Division, Parts
from harness.contract.place import Place
from harness.contract.strategy import Strategy, Unpredictable
from harness.contract.toolkit import checkpoints, knobs, mapped_files, optimizers, rows_on_disk, update_rules
from harness.contract.toolkit import trees as tree
from harness.contract.toolkit.memory import available_bytes
from harness.contract.toolkit.rows_on_disk import RowsOnDisk
from harness.contract.toolkit.turns import alike
from harness.contract.workload import Workload

if TYPE_CHECKING:
    from harness.contract import plugins
    from harness.contract.toolkit import mesh
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


def __getattr__(name: str) -> Any:
    """Import what a strategy does not need when it is asked for."""
    if name in ("Sizes", "of_torch", "of_jax"):
        from harness.workloads import user_model

        return getattr(user_model, name)
    if name == "plugins":
        from harness.contract import plugins

        return plugins
    if name == "mesh":  # of JAX
        from harness.contract.toolkit import mesh

        return mesh
    if name in ("door", "read", "predict"):
        from harness.report import door

        return door if name == "door" else getattr(door, name)
    if name == "run":
        return importlib.import_module("harness.run")
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
