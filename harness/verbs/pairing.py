"""The cases by which rows of several runs are paired: what was recorded before a size was there has its default."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from harness.contract.workload import Workload
from harness.records import Case
from harness.verdicts.judge import Comparison


def completed(tables: Iterable[Comparison], workloads: Mapping[str, Workload]) -> list[Comparison]:
    """Return comparisons whose cases have all sizes of their workload, those that a record lacks by their defaults.

    So a case has one digest, whenever it was recorded. That of a workload which is not among `workloads`, or which has
    no such shape any more, stays as it is.
    """
    return [
        replace(
            table,
            case=_complete(table.case, workloads),
            rows=tuple(replace(row, case=_complete(row.case, workloads)) for row in table.rows),
        )
        for table in tables
    ]


def _complete(case: Case, workloads: Mapping[str, Workload]) -> Case:
    """Return a case with the sizes that it lacks; what its record says stays."""
    workload = workloads.get(case.workload)
    if workload is None:
        return case
    return case.model_copy(update={"shape": {**_defaults(workload, case.shape), **case.shape}})


def _defaults(workload: Workload, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a shape lacks as its workload fills them in; none where it refuses the shape."""
    model: Any = workload.shape
    lacking = model.model_fields.keys() - shape.keys()
    if not lacking:
        return {}
    try:
        filled = model.model_validate(dict(shape)).model_dump(mode="json", include=lacking)
    except Exception:  # a plugin's own checks may raise anything
        return {}
    return dict(filled)
