"""What is asked of a worker and what came of it: the values that travel between processes and into files."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.records.case import Applied, Case, Claim, Value
    from harness.records.record import (
        Fit,
        Heading,
        Memory,
        Origin,
        Phase,
        Prediction,
        Rank,
        Record,
        Slot,
        Status,
        Times,
        Trial,
    )
    from harness.records.task import Kind, Task

__all__ = [
    "Applied",
    "Case",
    "Claim",
    "Fit",
    "Heading",
    "Kind",
    "Memory",
    "Origin",
    "Phase",
    "Prediction",
    "Rank",
    "Record",
    "Slot",
    "Status",
    "Task",
    "Times",
    "Trial",
    "Value",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: a place waits for no schema."""
    if name not in __all__:
        raise AttributeError(f"module 'harness.records' has no attribute {name!r}")
    home = {"Applied": "case", "Case": "case", "Claim": "case", "Value": "case", "Kind": "task", "Task": "task"}
    value = getattr(importlib.import_module(f"harness.records.{home.get(name, 'record')}"), name)
    globals()[name] = value
    return value
