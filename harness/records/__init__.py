"""What is asked of a worker and what came of it: the values that travel between processes and into files."""

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
