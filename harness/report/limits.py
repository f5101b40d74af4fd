"""What came of predictions that were tried as limits, as a table and one sentence."""

from collections.abc import Sequence
from statistics import fmean

from tabulate import tabulate

from harness.records import Case, Record, Trial
from harness.records.record import OUT_OF_MEMORY
from harness.report.text import escaped, row_name
from harness.report.words import AT_MOST, PREDICTED, Key, mib, titles
from harness.verdicts.observed import machine_of

COLUMNS = ("strategy", "peak MiB", PREDICTED, "within it", AT_MOST, "within that", "slack")
ALIGNED = ("left", "right", "right", "left", "right", "left", "right")
MEASURED_LEAST = 100 << 20
"""Peaks from which on a slack is worth a share: below, a constant of a few MiB is most of it."""


def text(records: Sequence[Record], level: str = "##") -> str:
    """Write one table for each comparison, and what all of them come to."""
    cases: dict[Key, Case] = {}
    tables: dict[Key, list[tuple[str, Trial]]] = {}
    for record in records:
        if record.case is not None and record.trial is not None:
            plain = record.case.plain.model_copy(update={"budget_bytes": None})
            key = plain.comparison_key, machine_of(record)
            cases[key] = plain
            tables.setdefault(key, []).append((record.case.label, record.trial))
    title_of = titles(cases)
    pieces = [summary([trial for rows in tables.values() for _, trial in rows])]
    for key, rows in tables.items():
        cells = [_cells(label, trial) for label, trial in rows]
        pieces.append(f"{level} {escaped(title_of[key])}")
        pieces.append(tabulate(cells, COLUMNS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True))
        if reasons := [f"- {escaped(label)}: {escaped(trial.reason)}" for label, trial in rows if trial.reason]:
            pieces.append("\n".join(reasons))
    return "\n\n".join(pieces) + "\n"


def summary(trials: Sequence[Trial]) -> str:
    """Say how many cases ran out of memory within each limit, and how far the wider one was above the peaks."""
    sentences = []
    limits = (
        ("the predicted peak", [trial.at_point for trial in trials]),
        ("what they take at most", [trial.at_most for trial in trials]),
    )
    for name, statuses in limits:
        ran = [status for status in statuses if status is not None]
        if ran:
            died = sum(status in OUT_OF_MEMORY for status in ran)
            sentences.append(f"Within {name}, {died} of {len(ran)} cases ran out of memory ({died / len(ran):.1%}).")
    slacks = [trial.slack for trial in trials if trial.slack is not None and (trial.peak_bytes or 0) >= MEASURED_LEAST]
    if slacks:
        mean = f"{fmean(slacks):.1%}"
        sentences.append(f"What cases of 100 MiB or more take at most was {mean} above their peak on average.")
    return " ".join(sentences) or "No case could be tried."


def _cells(label: str, trial: Trial) -> tuple[str, ...]:
    return (
        row_name(label),
        mib(trial.peak_bytes),
        mib(trial.predicted_peak_bytes),
        trial.at_point or "",
        mib(trial.at_most_bytes),
        trial.at_most or "",
        "" if trial.slack is None else f"{trial.slack:.1%}",
    )
