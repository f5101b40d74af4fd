"""One sentence for a comparison: what to use, what it saves and what it costs."""

from collections.abc import Mapping, Sequence

from harness.contract.strategy import Strategy
from harness.records.record import EXACT, OUT_OF_MEMORY
from harness.report.text import escaped
from harness.report.words import each_rank, key_of, mib, titles
from harness.verdicts.choice import Choice, choice, reaches_users
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.times import rounds

INEXACT = {"lower_precision": "in lower precision", "approximate": "by another algorithm"}
"""How a row answers that does not answer as before."""


def sentence(table: Comparison, strategies: Mapping[str, Strategy]) -> str:
    """Return the answer of a comparison, or an empty text where what was measured gives none."""
    best = choice(table, strategies)
    if best is None:
        return _without_choice(table)
    pieces = []
    if best.row is not None:
        lead = "Use" if best.baseline_fits else "The baseline runs out of memory; use"
        pieces.append(f"{lead} **{escaped(best.row.label)}**: {cost(best.row)}, answers as before")
    elif known := _without_exact(table, best):
        pieces.append(known)
    if best.inexact is not None:
        kind = INEXACT.get(best.inexact.answer or "", "otherwise")
        pieces.append(f"{kind} with **{escaped(best.inexact.label)}**: {cost(best.inexact)}")
    text = "; ".join(pieces)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _without_exact(table: Comparison, best: Choice) -> str:
    """Return what is known of strategies that answer as before where none can be named; an empty text for nothing."""
    rows = [row for row in table.rows if not (row.case.is_baseline or row.case.is_control)]
    if not rows or not (best.baseline_fits or best.inexact is not None):
        return ""
    if best.baseline_fits and all(map(_takes_no_less, rows)):
        return "No strategy here saves memory"
    exact = [row for row in rows if not _answers_otherwise(row) and row.status != "unsupported"]
    if not exact:
        return "No strategy that answers as before was measured here"
    if all(map(_takes_no_less, exact)):
        return "No strategy that answers as before saves memory here" if best.baseline_fits else "No exact row fits"
    if best.baseline_fits and all(_takes_no_less(row) or not reaches_users(row) for row in exact):
        return "No strategy that answers as before saves memory with the usual allocator"
    if best.inexact is None:
        return ""
    return f"Whether one that answers as before {'saves memory' if best.baseline_fits else 'fits'} is not known"


def _takes_no_less(row: Row) -> bool:
    """Check whether it is known of a row that it saves no memory here; one that cannot run here does not."""
    return row.memory in ("same", "more") or row.status in (*OUT_OF_MEMORY, "unsupported")


def _answers_otherwise(row: Row) -> bool:
    return row.answer is not None and row.answer not in EXACT


def _without_choice(table: Comparison) -> str:
    """Return why no row can be chosen: all ran out of memory, or the baseline ended otherwise."""
    statuses = {row.status for row in table.rows}
    if statuses <= OUT_OF_MEMORY:
        return f"Nothing here fits {'the budget' if 'oom_budget' in statuses else 'this machine'}."
    status = next((row.status for row in table.rows if row.case.is_baseline), "open")
    if status in ("open", *OUT_OF_MEMORY) or not any(row.status == "ok" for row in table.rows):
        return ""
    return f"The rows cannot be compared: the baseline ended with {status}."


def last_lines(tables: Sequence[Comparison], strategies: Mapping[str, Strategy]) -> str:
    """Return the answers of a run, one line for each comparison."""
    title_of = titles({key_of(table): table.case for table in tables})
    answers = [(title_of[key_of(table)], sentence(table, strategies)) for table in tables]
    return "\n".join(f"- {escaped(title)}: {text}" for title, text in answers if text)


def cost(row: Row) -> str:
    """Return the memory and the time of a row as multiples of the baseline's, as far as they are known."""
    memory = f"{mib(row.peak_bytes)} MiB" if row.peak_ratio is None else f"{row.peak_ratio:.2f} x the memory"
    memory += each_rank(row)
    speed = row.speed
    if speed is None:
        return memory
    if speed.standard_error is None:
        return f"{memory} at a time that {rounds(speed.rounds)} cannot tell"
    return f"{memory} at {speed.low:.2f} to {speed.high:.2f} x the time"
