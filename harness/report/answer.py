"""One sentence for a comparison: what to use, what it saves and what it costs."""

from collections.abc import Sequence

from harness.report.text import escaped
from harness.report.words import heading, mib, rounds
from harness.verdicts.choice import choice
from harness.verdicts.judge import Comparison, Row


def sentence(table: Comparison) -> str:
    """Return the answer of a comparison, or an empty text where nothing of it was measured."""
    best = choice(table)
    if best is None:
        return ""
    if best.row is None and best.inexact is None:
        return "No strategy here saves memory." if best.baseline_fits else "Nothing here fits the budget."
    pieces = []
    if best.row is not None:
        lead = "Use" if best.baseline_fits else "The baseline runs out of memory; use"
        pieces.append(f"{lead} **{escaped(best.row.label)}**: {_cost(best.row)}, answers as before")
    else:
        pieces.append(
            "No strategy that answers as before saves memory here" if best.baseline_fits else "No exact row fits"
        )
    if best.inexact is not None:
        kind = escaped((best.inexact.answer or "").replace("_", " "))
        pieces.append(f"with {kind} **{escaped(best.inexact.label)}**: {_cost(best.inexact)}")
    return "; ".join(pieces) + "."


def last_lines(tables: Sequence[Comparison]) -> str:
    """Return the answers of a run, one line for each comparison."""
    answers = [(table, text) for table in tables if (text := sentence(table))]
    lines = [f"- {escaped(heading(table.case))}: {text}" for table, text in answers]
    return "\n".join(lines)


def _cost(row: Row) -> str:
    memory = f"{mib(row.peak_bytes)} MiB" if row.peak_ratio is None else f"{row.peak_ratio:.2f} x the memory"
    speed = row.speed
    if speed is None:
        return memory
    if speed.standard_error is None:
        return f"{memory} at a time that {rounds(speed.rounds)} cannot tell"
    return f"{memory} at {speed.low:.2f} to {speed.high:.2f} x the time"
