"""The longest values that fit a budget, as tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from harness.records import Case, Record
from harness.report.plan import row_name
from harness.report.table import claimed, escaped
from harness.suite.units import shown
from harness.verdicts.claims import answered
from harness.verdicts.judge import searched

LIMITS = ("strategy", "predicted", "passed", "failed", "of baseline", "runs")


@dataclass(frozen=True)
class Limits:
    """The longest value of each row in one place and budget, and below it what is to be said; all as plain text."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]


def limits(found: Sequence[Record]) -> list[Limits]:
    """Give one table for each place and budget: the longest value of each row, as predicted and as it ran."""
    tables: dict[str, list[Record]] = {}
    for row in found:
        if row.limits is not None and row.case is not None:
            title = f"longest {row.limits.over} in {shown(row.limits.budget_bytes)}: {_where(row.case)}"
            tables.setdefault(title, []).append(row)
    made = []
    for title, rows in tables.items():
        baseline = next((row for row in rows if row.case and not row.case.strategies), None)
        reasons = (
            f"{row.case.label}: {row.limits.reason}" for row in rows if row.case and row.limits and row.limits.reason
        )
        made.append(Limits(title, tuple(_fit_cells(row, baseline) for row in rows), tuple(reasons)))
    return made


def _where(case: Case) -> str:
    """Name the workload and place, and the vocabulary, which some suites vary."""
    vocabulary = case.shape.get("vocabulary")
    return f"{case.workload} on {case.place}" + (f", vocabulary {vocabulary:,}" if vocabulary else "")


def fits(found: Sequence[Record], level: str = "##") -> str:
    """Write the limits as markdown, and below them the answers to the claims that the records begin with."""
    pieces = []
    for table in limits(found):
        cells = [(row_name(row[0]), *map(escaped, row[1:])) for row in table.rows]
        aligned = ("left", "right", "right", "left", "right", "right")
        pieces.append(f"{level} {escaped(table.title)}")
        pieces.append(tabulate(cells, LIMITS, tablefmt="pipe", colalign=aligned, disable_numparse=True))
        pieces += ["\n".join(f"- {escaped(reason)}" for reason in table.reasons)] if table.reasons else []
    answers = answered(found, searched(found))
    pieces += [f"{level} Claims", claimed(answers)] if answers else []
    return "\n\n".join(pieces) + "\n"


def _fit_cells(row: Record, baseline: Record | None) -> tuple[str, ...]:
    assert row.case is not None and row.limits is not None
    found, other = row.limits, baseline.limits if baseline is not None and row is not baseline else None
    own, its = (None if each is None else each.longest for each in (found, other))
    return (
        row.case.label,
        "none" if found.predicted is None else f"{found.predicted:,}",
        "" if found.passed is None else f"{found.passed:,}",
        "" if found.failed is None else f"{found.failed:,} ({found.how})",
        f"{own / its:.2f} x" if own and its else "",
        str(found.runs or ""),
    )
