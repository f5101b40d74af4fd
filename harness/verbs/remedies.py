"""Where no case of a comparison fits: by how much the leanest is too large, and half of which size would help."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.contract.plugins import Plugins
from harness.records import Case
from harness.suite.plan import Plan
from harness.suite.units import shown
from harness.verbs.machine import Machine
from harness.verbs.plan import PlanRow, beyond_host, need, of_cases, valid

SHRINKABLE = ("tokens", "batch", "layers")
"""Sizes to halve where nothing else helps, the one that people give up first in front.

Nobody halves the layers of a published model.
"""
LEAST_HELP = 0.01
"""The share of what is needed that half of a size must save to be named."""


@dataclass(frozen=True)
class Remedy:
    """What to change where nothing fits, and what the leanest row would take at most then."""

    change: str
    need_bytes: int
    fits: bool


def remedies(
    rows: Sequence[PlanRow], plan: Plan, plugins: Plugins, names: tuple[str, ...], machine: Machine
) -> list[Remedy]:
    """Return what would help where nothing fits, the most helpful first: the leanest row with half a size.

    Empty where something fits, nothing is known, or half of a size takes as much.
    """
    lean = leanest(rows)
    if lean is None or not all_too_large(rows):
        return []
    halved = {
        name: case for name in SHRINKABLE if (case := _halved(lean.case, name)) is not None and valid(plugins, case)
    }
    predicted = of_cases(list(halved.values()), plan, plugins, names, machine, calls=False)
    remedies = [
        Remedy(f"{name} {row.case.shape[name]:,}", row.need_bytes, bool(row.fits))
        for name, row in zip(halved, predicted, strict=True)
        if row.need_bytes is not None and row.need_bytes < (1 - LEAST_HELP) * (lean.need_bytes or 0)
    ]
    return sorted(remedies, key=lambda remedy: remedy.need_bytes)


def _halved(case: Case, name: str) -> Case | None:
    """Return a case with half a size; None where it has no such size, or it cannot be halved."""
    value = case.shape.get(name)
    if not isinstance(value, int) or value < 2 or (name == "layers" and "config" in case.shape):
        return None
    return case.model_copy(update={"shape": case.shape | {name: value // 2}})


def leanest(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the row that is least over its limit, of those whose need and limit are known; the host comes first."""
    known = (row for row in rows if row.need_bytes is not None and row.limit_bytes is not None)
    return min(known, key=excess, default=None)


def all_too_large(rows: Sequence[PlanRow]) -> bool:
    """Check whether nothing of a comparison fits, as far as it is known what that takes and may take."""
    return leanest(rows) is not None and not any(row.fits for row in rows)


def excess(row: PlanRow) -> tuple[int, int]:
    """Return by how much a row is over the limit of the host, and over its own; less than 0 where it is below that."""
    return row.over_host_bytes, (row.need_bytes or 0) - (row.limit_bytes or 0)


def none_fits(rows: Sequence[PlanRow]) -> str:
    """Say that nothing of a comparison fits; where it is not known of some rows, nothing of the others."""
    return f"nothing {'' if all(row.fits is not None for row in rows) else 'that can be predicted '}fits"


def shortfall(rows: Sequence[PlanRow]) -> str:
    """Write in one sentence by how much the leanest row of a comparison is too large where nothing of it fits."""
    row = leanest(rows)
    assert row is not None and row.need_bytes is not None and row.limit_bytes is not None
    if row.over_host_bytes:
        return f"{none_fits(rows)}: the leanest, {row.case.label}, {beyond_host(row)}"
    over = row.need_bytes - row.limit_bytes
    return (
        f"{none_fits(rows)}: the leanest, {row.case.label}, takes {need(row)} "
        f"and is {shown(over)} over {shown(row.limit_bytes)}"
    )
