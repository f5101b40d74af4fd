"""Markdown tables: one for each comparison, one row for each strategy."""

from collections.abc import Iterable, Sequence

from pydantic import ValidationError
from tabulate import tabulate

from harness.assembly import shape_of
from harness.judge import Row, Table, judge
from harness.plugins import Plugins
from harness.records import Case, Record

MIB = 1 << 20
HEADERS = (
    "strategy", "peak MiB", "of baseline", "predicted", "residual", "x floor", "peak in", "tokens/s", "step time",
    "answer", "verdict",
)  # fmt: skip
ALIGNED = ("left", "right", "right", "right", "right", "right", "left", "right", "left", "left", "left")


def of_records(found: Sequence[Record], plugins: Plugins, headed: bool = True, title: str = "") -> str:
    """Judge the records of a results file and write its tables, where `headed` under a title or the suite's name."""
    tables = judge(found)
    tokens = {table.case.group: _tokens(table.case, plugins) for table in tables}
    known = {group: count for group, count in tokens.items() if count is not None}
    if not headed:  # within a section of another document
        return markdown(tables, known, level="####")
    return markdown(tables, known, title or next((record.suite for record in found), "no records"))


def _tokens(case: Case, plugins: Plugins) -> int | None:
    """Give the tokens of a step; None for a record of a workload that is not, or no longer, such a one."""
    workload = plugins.workloads.get(case.workload)
    try:
        return None if workload is None else workload.tokens_per_step(shape_of(plugins, case))
    except ValidationError:
        return None


def markdown(tables: Sequence[Table], tokens_per_step: "dict[str, int]", title: str = "", level: str = "##") -> str:
    """Write all tables as markdown, each under a heading of a level; figures are rounded here and nowhere else."""
    pieces = [f"# {escaped(title)}"] if title else []
    for table in tables:
        pieces.append(f"{level} {escaped(_heading(table.case))}")
        reason = _untested(table)
        if reason is None:
            rows = [_cells(row, tokens_per_step) for row in table.rows]
            pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True))
            pieces += [*table.notes, *_remarks(table)]
        else:
            pieces += [f"Untested: {escaped(reason)}.", *_predicted(table)]
    return "\n\n".join(pieces) + "\n"


def _heading(case: Case) -> str:
    shape = case.shape
    told = [f"{case.workload} on {case.place}"]
    if "tokens" in shape:
        told.append(f"{_grouped(shape['tokens'])} tokens")
    told += [f"{name} {_grouped(shape[name])}" for name in ("layers", "width", "vocabulary", "batch") if name in shape]
    if case.budget_bytes:
        told.append(f"budget {case.budget_bytes / MIB:,.0f} MiB")
    return ", ".join(told)


def _grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _untested(table: Table) -> str | None:
    """Say why nothing of a comparison could be measured here, or None when something was."""
    if not all(row.status == "unsupported" for row in table.rows):
        return None
    return "; ".join(dict.fromkeys(reason for row in table.rows for reason in row.reasons))


def _predicted(table: Table) -> list[str]:
    """Show what is known of a place that this machine lacks: the predictions."""
    rows = [
        (
            _name(row),
            _mib(peak),
            _phase(row.predicted_phase),
            f"{peak / row.floor_bytes:.1f}" if row.floor_bytes else "",
        )
        for row in table.rows
        if (peak := row.predicted_bytes) is not None
    ]
    headers = ("strategy", "predicted MiB", "peak in", "x floor")
    aligned = ("left", "right", "left", "right")
    return [tabulate(rows, headers, tablefmt="pipe", colalign=aligned, disable_numparse=True)] if rows else []


def _name(row: Row) -> str:
    return f"`{escaped(row.label)}`" if row.case.strategies else "baseline"


def _cells(row: Row, tokens_per_step: "dict[str, int]") -> list[str]:
    tokens = tokens_per_step.get(row.case.group)
    return [
        _name(row),
        _peak(row),
        "" if row.peak_ratio is None or not row.case.strategies else f"{row.peak_ratio:.2f} x",
        _mib(row.predicted_bytes),
        "" if row.residual_ratio is None else f"{row.residual_ratio:+.1%}",
        "" if row.floor_ratio is None else f"{row.floor_ratio:.1f}",
        escaped(_phase(row.peak_phase)),
        f"{tokens / row.step_median_seconds:,.0f}" if tokens and row.step_median_seconds else "",
        _time(row),
        escaped(row.answer or ""),
        row.verdict,
    ]


def _peak(row: Row) -> str:
    if row.status == "ok":
        return _mib(row.peak_bytes)
    if row.status == "oom_budget" and row.case.budget_bytes:
        return f"> {row.case.budget_bytes / MIB:,.0f}"
    return row.status


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / MIB:,.0f}" if value >= 100 * MIB else f"{value / MIB:,.1f}"


def _phase(name: str | None) -> str:
    """Show the phase that sets the peak, and how many tie with it."""
    if not name:
        return ""
    first, *others = [phase.removeprefix("steady_step/").removeprefix("first_step/") for phase in name.split(", ")]
    more = len(dict.fromkeys(other for other in others if other != first))
    return first + (f" (+{more})" if more else "")


def _time(row: Row) -> str:
    if row.effect is None:
        return ""
    effect = row.effect
    spread = f"{effect.low:.2f}-{effect.high:.2f}" if effect.rounds > 1 else "one round"
    return f"{effect.ratio:.2f} x ({spread}) {row.speed or 'withheld'}"


def _remarks(table: Table) -> Iterable[str]:
    """Say below a table what its cells could not hold: failures, wrong answers, flags."""
    measured = [set(row.flags) for row in table.rows if row.status == "ok"]
    shared = set.intersection(*measured) if measured else set()
    lines = [f"- all: flags: {', '.join(sorted(shared))}"] if shared else []
    for row in table.rows:
        told = list(row.reasons)
        if row.answer in ("diverged", "invalid"):
            told.append(f"{row.answer}: {row.answer_reason}")
        elif row.answer is None and row.answer_reason:
            told.append(f"no answer: {row.answer_reason}")
        if own := [flag for flag in row.flags if flag not in shared]:
            told.append(f"flags: {', '.join(own)}")
        if told:
            lines.append(f"- {escaped(row.label)}: {escaped('; '.join(told))}")
    return ["\n".join(lines)] if lines else []


def escaped(text: str) -> str:
    """Make text inert in markdown and in a terminal: no markup, no control characters, no new cells."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    for character in "\\`*<>|[]":
        printable = printable.replace(character, "\\" + character) if character not in "<>" else printable
    return printable.replace("<", "&lt;").replace(">", "&gt;")
