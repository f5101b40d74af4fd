"""What was foreseen, as markdown: plans and limits."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from harness.claims import answered
from harness.judge import searched
from harness.planner import Foreseen, Remedy, shortfall
from harness.records import Case, Record
from harness.report.table import claimed, escaped, heading, mib, phase_name
from harness.sizes import shown

HEADERS = ("strategy", "predicted MiB", "peak in", "x floor", "of baseline", "step time", "fits")
ALIGNED = ("left", "right", "left", "right", "right", "right", "left")
SEVERAL = 3


def plan(groups: Sequence[Sequence[Foreseen]], helps: Sequence[Sequence[Remedy]]) -> str:
    """Write one table for each group, and below it what to change where nothing fits."""
    pieces = []
    for rows, remedies in zip(groups, helps, strict=True):
        limit = rows[0].limit_bytes
        told = (
            f"may use {shown(limit)}" if limit is not None else "its memory is not known: give --gpu-memory or --budget"
        )
        pieces.append(f"## {escaped(heading(rows[0].case))}; {told}")
        if all(row.peak_bytes is None for row in rows):
            pieces.append(f"Not predicted: {escaped('; '.join(dict.fromkeys(row.reason or '' for row in rows)))}.")
            continue
        pieces += [grid(rows), *_remarks(rows)]
        if limit is not None and not any(row.fits for row in rows):
            pieces.append(f"{escaped(shortfall(rows))}. {_helpful(rows, remedies)}".strip())
    return "\n\n".join(pieces) + "\n"


def grid(rows: Sequence[Foreseen]) -> str:
    """Write one row for each case; ratios are to the baseline among them."""
    baseline = next((row for row in rows if not row.case.strategies), None)
    cells = [_cells(row, baseline) for row in rows]
    return tabulate(cells, HEADERS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True)


def _cells(row: Foreseen, baseline: Foreseen | None) -> tuple[str, ...]:
    other = baseline if row.case.strategies else None
    peak, floor = row.peak_bytes, row.floor_bytes
    return (
        _name(row.case.label),
        mib(peak),
        escaped(phase_name(row.phase)),
        f"{peak / floor:.1f}" if peak and floor else "",
        f"{peak / other.peak_bytes:.2f} x" if peak and other and other.peak_bytes else "",
        f"{row.seconds / other.seconds:.2f} x" if row.seconds and other and other.seconds else "",
        "" if row.fits is None else "yes" if row.fits else "NO",
    )


def _name(label: str) -> str:
    return label if label == "baseline" else f"`{escaped(label)}`"


def _remarks(rows: Sequence[Foreseen]) -> list[str]:
    told = [f"- {escaped(row.case.label)}: {escaped(row.reason)}" for row in rows if row.reason]
    return ["\n".join(told)] if told else []


def _helpful(rows: Sequence[Foreseen], remedies: Sequence[Remedy]) -> str:
    """Name what saves most among the strategies, and what halving a size would bring."""
    whole = next((row.peak_bytes for row in rows if not row.case.strategies), None)
    saved = [(whole - row.peak_bytes, row.case.label) for row in rows if whole and row.peak_bytes]
    best = [(size, label) for size, label in sorted(saved, reverse=True) if size > 0][:SEVERAL]
    pieces = []
    if best:
        told = [f"{escaped(label)} saves {shown(size)}" for size, label in best]
        pieces.append("In order of effect: " + ", ".join(told) + ".")
    if remedies:
        told = [f"{each.change} takes {shown(each.peak_bytes)}{' and fits' if each.fits else ''}" for each in remedies]
        pieces.append("The leanest with half of a size: " + ", ".join(told) + ".")
    return " ".join(pieces)


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
        if row.fit is not None and row.case is not None:
            title = f"longest {row.fit.over} in {shown(row.fit.budget_bytes)}: {_where(row.case)}"
            tables.setdefault(title, []).append(row)
    made = []
    for title, rows in tables.items():
        baseline = next((row for row in rows if row.case and not row.case.strategies), None)
        reasons = (f"{row.case.label}: {row.fit.reason}" for row in rows if row.case and row.fit and row.fit.reason)
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
        cells = [(_name(row[0]), *map(escaped, row[1:])) for row in table.rows]
        aligned = ("left", "right", "right", "left", "right", "right")
        pieces.append(f"{level} {escaped(table.title)}")
        pieces.append(tabulate(cells, LIMITS, tablefmt="pipe", colalign=aligned, disable_numparse=True))
        pieces += ["\n".join(f"- {escaped(reason)}" for reason in table.reasons)] if table.reasons else []
    answers = answered(found, searched(found))
    pieces += [f"{level} Claims", claimed(answers)] if answers else []
    return "\n\n".join(pieces) + "\n"


def _fit_cells(row: Record, baseline: Record | None) -> tuple[str, ...]:
    assert row.case is not None and row.fit is not None
    found, other = row.fit, baseline.fit if baseline is not None and row is not baseline else None
    own, its = (None if each is None else each.longest for each in (found, other))
    return (
        row.case.label,
        "none" if found.predicted is None else f"{found.predicted:,}",
        "" if found.passed is None else f"{found.passed:,}",
        "" if found.failed is None else f"{found.failed:,} ({found.how})",
        f"{own / its:.2f} x" if own and its else "",
        str(found.runs or ""),
    )
