"""Comparisons that differ in their length alone, so that one line may join them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.records.case import CONTROL
from harness.report.charts.style import MIB
from harness.report.export import Figures

LENGTH = "tokens"
PLAIN = ("workload", "corpus", "tokenizer", "seed")
"""What a comparison is of beside its sizes, its machine and its budget."""
FOLLOWING = ("budget_bytes", "run_utc")
"""What may differ from length to length, where each length has one."""
Sizes = dict[str, Any]
Compared = list[Figures]
"""The rows of one comparison."""


def by_length(rows: Sequence[Figures]) -> list[tuple[str, list[Figures]]]:
    """Return the rows of one place that belong together, and in words what tells them from the others.

    Those with peaks at fewer than two lengths are left out, and so are controls.
    """
    groups = [group for group in _groups(rows) if len(known_lengths(group)) > 1]
    sizes = [_sizes(group) | _following(group) for group in groups]
    names = dict.fromkeys(name for each in sizes for name in each)
    varying = [name for name in names if len({repr(each.get(name)) for each in sizes}) > 1]
    words = [[_said(name, each[name]) for name in varying if each.get(name) not in (None, "")] for each in sizes]
    return [(", ".join(each), group) for each, group in zip(words, groups, strict=True)]


def known_lengths(rows: Sequence[Figures]) -> set[int]:
    """Return the lengths of rows whose peak was measured or predicted."""
    known = (row for row in rows if (row["status"] == "ok" and row["peak_bytes"]) or row["predicted_bytes"])
    return {row["shape"][LENGTH] for row in known}


def _groups(rows: Sequence[Figures]) -> Iterator[list[Figures]]:
    by_comparison: dict[str, Compared] = {}
    for row in rows:
        if row["shape"].get(LENGTH) and row["strategy"] != CONTROL:
            by_comparison.setdefault(row["comparison"], []).append(row)
    by_sizes: dict[str, list[Compared]] = {}
    for members in by_comparison.values():
        by_sizes.setdefault(json.dumps(_sizes(members), sort_keys=True), []).append(members)
    groups = list(by_sizes.values())
    for name in FOLLOWING:
        groups = [part for group in groups for part in _divided(group, name)]
    for group in groups:
        yield [row for members in group for row in members]


def _divided(comparisons: list[Compared], name: str) -> list[list[Compared]]:
    """Divide comparisons by a figure where one length has several of it."""
    of_length: dict[int, set[Any]] = {}
    parts: dict[Any, list[Compared]] = {}
    for members in comparisons:
        of_length.setdefault(members[0]["shape"][LENGTH], set()).add(members[0][name])
        parts.setdefault(members[0][name], []).append(members)
    return list(parts.values()) if any(len(each) > 1 for each in of_length.values()) else [comparisons]


def _sizes(rows: Sequence[Figures]) -> Sizes:
    """Return all that a comparison is of, but for its length and what may follow that."""
    shape = {name: value for name, value in rows[0]["shape"].items() if name != LENGTH}
    return {name: rows[0][name] for name in PLAIN} | dict(_flat(shape)) | {"on": _machine(rows)}


def _flat(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        words = f"{within} {name.replace('_', ' ')}".strip()
        if isinstance(value, Mapping):
            yield from _flat(value, words)
        else:
            yield words, value


def _machine(rows: Sequence[Figures]) -> str:
    """Return where rows were measured, or else tried."""
    ran = [row["machine"] for row in rows if row["status"] == "ok"] or [row["machine"] for row in rows]
    return " and ".join(sorted({name for name in ran if name}))


def _following(rows: Sequence[Figures]) -> Sizes:
    """Return the budget and the run of rows that have the same."""
    budgets, runs = ({row[name] for row in rows} for name in FOLLOWING)
    budget, run = (each.pop() if len(each) == 1 else None for each in (budgets, runs))
    return {"budget": budget and f"{budget / MIB:,.0f} MiB", "run of": run and run[:19].replace("T", " ")}


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{name} {str(value).lower()}"
    return f"{name} {value:,}" if isinstance(value, int | float) else f"{name} {value}"
