"""The longest values that fit a budget, as tables."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from harness.records import Case, Fit, Record
from harness.report.plan import BETWEEN_RANKS, NO_HOST, UNBOUNDED
from harness.report.table import claimed, filled_columns
from harness.report.text import escaped, row_name, with_code
from harness.report.words import AT_MOST, PREDICTED, RESERVED, SEGMENTS, Key, mib, titles
from harness.suite.units import shown
from harness.verdicts.claims import Answer, answered
from harness.verdicts.figures import most
from harness.verdicts.judge import searched
from harness.verdicts.observed import machine_of

COLUMNS = ("strategy", "predicted", PREDICTED, AT_MOST, RESERVED, "passed", "failed", "of baseline", "runs")
ALIGNED = ("left", "right", "right", "right", "right", "right", "left", "right", "right")


@dataclass(frozen=True)
class Limits:
    """The longest value of each row of a comparison in one budget, and why there is no more; all as plain text.

    `predicted MiB`, `at most` and `reserved MiB` are left out where no row has one. `remarks` say by what it is judged
    what fits, as those of a plan do.
    """

    title: str
    headers: tuple[str, ...]
    aligned: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def limits(records: Sequence[Record]) -> list[Limits]:
    """Return one table for each comparison and budget: the longest value of each row, as predicted and as it ran."""
    cases: dict[Key, Case] = {}
    tables: dict[tuple[str, int, Key], list[Record]] = {}
    for row in records:
        if row.limits is not None and row.case is not None:
            plain = _without(row.case, row.limits.over)
            key = plain.comparison_key, machine_of(row)
            cases[key] = plain
            tables.setdefault((row.limits.over, row.limits.budget_bytes, key), []).append(row)
    title_of = titles(cases)
    answers = []
    for (over, budget, key), rows in tables.items():
        title = f"longest {over} in {shown(budget)}: {title_of[key]}"
        baseline = next((row for row in rows if row.case and row.case.is_baseline), None)
        reasons = (
            f"{row.case.label}: {row.limits.reason}" for row in rows if row.case and row.limits and row.limits.reason
        )
        cells = [_fit_cells(row, baseline) for row in rows]
        columns = filled_columns(COLUMNS, cells)
        headers, aligned, *chosen = (tuple(row[at] for at in columns) for row in (COLUMNS, ALIGNED, *cells))
        answers.append(Limits(title, headers, aligned, tuple(chosen), tuple(reasons), tuple(_remarks(rows))))
    return answers


def _remarks(rows: Sequence[Record]) -> Iterator[str]:
    """Yield by what is judged what fits, and what is not counted."""
    searches = [(row.case, row.limits) for row in rows if row.case is not None and row.limits is not None]
    on_gpu = [limit for case, limit in searches if str(case.place) == "torch/cuda" and limit.predicted is not None]
    if on_gpu:
        yield SEGMENTS + ("" if all(limit.host_limit_bytes is not None for limit in on_gpu) else NO_HOST)
    if any(limit.predicted is not None and limit.at_most_bytes is None for _, limit in searches):
        yield UNBOUNDED
    if any(case.ranks > 1 and case.place.device == "cuda" for case, _ in searches):
        yield BETWEEN_RANKS


def _without(case: Case, over: str) -> Case:
    """Return the case that all rows of a search share: without strategies, the size that is searched and its budget."""
    shape = {name: value for name, value in case.shape.items() if name != over}
    return case.plain.model_copy(update={"shape": shape, "budget_bytes": None})


def text(records: Sequence[Record], level: str = "##", answers: Sequence[Answer] | None = None) -> str:
    """Write the limits as markdown, then the answers; by default to the claims that the records begin with."""
    pieces = []
    for table in limits(records):
        cells = [(row_name(row[0]), *map(escaped, row[1:])) for row in table.rows]
        pieces.append(f"{level} {escaped(table.title)}")
        pieces.append(tabulate(cells, table.headers, tablefmt="pipe", colalign=table.aligned, disable_numparse=True))
        if below := [*table.remarks, *(f"- {with_code(reason)}" for reason in table.reasons)]:
            pieces.append("\n".join(below))
    if answers is None:
        answers = answered(records, searched(records))
    if answers:
        pieces += [f"{level} Claims", claimed(answers)]
    return "\n\n".join(pieces) + "\n"


def _fit_cells(row: Record, baseline: Record | None) -> tuple[str, ...]:
    assert row.case is not None and row.limits is not None
    limit = row.limits
    of_baseline = baseline.limits if baseline is not None and row is not baseline else None
    return (
        row.case.label,
        _predicted(row),
        mib(limit.predicted_peak_bytes),
        mib(limit.at_most_bytes),
        mib(limit.predicted_reserved_bytes),
        "" if limit.passed is None else f"{limit.passed:,}",
        "" if limit.failed is None else f"{limit.failed:,} ({limit.how})",
        "" if of_baseline is None else _ratio(limit, of_baseline),
        str(limit.runs or ""),
    )


def _ratio(own: Fit, baseline: Fit) -> str:
    """Write how a longest value compares with the baseline's, like with like: both as they ran, or both predicted.

    A search that ended without a value that is too large gives a bound, and two of them nothing.
    """
    if not (own.passed and baseline.passed):
        if any(each.failed and not each.passed for each in (own, baseline)) or not (
            own.predicted and baseline.predicted
        ):
            return ""
        ratio = _bounded(own.predicted / baseline.predicted, own.open, baseline.open)
        return f"{ratio}, predicted" if ratio else ""
    open_, its_open = (math.isinf(most(each, each.passed or 0)) for each in (own, baseline))
    return _bounded(own.passed / baseline.passed, open_, its_open)


def _bounded(ratio: float, open_: bool, its_open: bool) -> str:
    """Write a ratio, as a bound where one of the two searches is open, and not at all where both are."""
    if open_ and its_open:
        return ""
    return f"{ratio:.2f} x{' or more' if open_ else ' or less' if its_open else ''}"


def _predicted(row: Record) -> str:
    """Write the longest value that is predicted to fit, or below which it lies: nothing less than that was tried."""
    assert row.case is not None and row.limits is not None
    limit, least = row.limits, row.case.shape.get(row.limits.over)
    if limit.predicted is not None:
        return f"{limit.predicted:,}"
    return f"below {least:,}" if isinstance(least, int) and "predicted" not in row.missing else ""
