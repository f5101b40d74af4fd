"""Compare memory strategies: a plugin author's whole world."""

from harness.hooks import hookimpl
from harness.objective import Objective
from harness.types import IGNORED, Extent, Held, Parts, Place, Source, Strategy, Windows, Workload

__all__ = [
    "IGNORED",
    "Extent",
    "Held",
    "Objective",
    "Parts",
    "Place",
    "Source",
    "Strategy",
    "Windows",
    "Workload",
    "hookimpl",
]
__version__ = "0.4.0"
