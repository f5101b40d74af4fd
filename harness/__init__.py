"""Compare memory strategies: a plugin author's whole world."""

from harness.hooks import hookimpl
from harness.types import Extent, Held, Parts, Place, Source, Strategy, Windows, Workload

__all__ = ["Extent", "Held", "Parts", "Place", "Source", "Strategy", "Windows", "Workload", "hookimpl"]
__version__ = "0.1.0"
