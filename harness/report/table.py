"""Markdown tables: one for each comparison, one row for each strategy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError
from tabulate import tabulate

from harness.contract.assembly import shape_of
from harness.contract.plugins import Plugins
from harness.records import Case
from harness.records.record import WRONG
from harness.report.answer import sentence
from harness.report.results import Results
from harness.report.text import escaped, row_name, with_code
from harness.report.words import AT_MOST, PREDICTED, RESERVED, key_of, mib, phase_name, residual, sureness, titles_of
from harness.verdicts.claims import Answer
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.pooled import DECIDED
from harness.verdicts.times import rounds

MIB = 1 << 20
FETCH = "fetch ms"
NATIVE, HOST = "as started", "host MiB"
HEADERS = (
    "strategy", "peak MiB", "memory", HOST, NATIVE, "predicted", AT_MOST, "residual", "x floor", "peak in", "tokens/s",
    FETCH, "time", "answer", "verdict",
)  # fmt: skip
ALIGNED = (
    "left", "right", "left", "right", "left", "right", "right", "right", "right", "left", "right",
    "right", "left", "left", "left",
)  # fmt: skip
BRIEF = ("strategy", "peak MiB", "memory", HOST, NATIVE, "predicted", AT_MOST, "time", "answer", "verdict")
"""The columns of some chosen rows."""
SPARSE = (HOST, NATIVE, AT_MOST, PREDICTED, RESERVED)
"""Columns that are left out where they would be empty."""
FETCH_SHARE = 0.02
"""The share of a step from which on the wait for its batch is worth a column."""


def of_results(results: Results, plugins: Plugins, headed: bool = True, title: str = "", run: str | None = None) -> str:
    """Write the tables of a results file, where `headed` under a title or the suite's name.

    Each names its machine and the `run`, unless that is None.
    """
    if not headed:  # within a section of another document
        return markdown(results.tables, plugins, level="####", answers=results.answers, run=run)
    name = title or (results.suite if results.records else "no records")
    return markdown(results.tables, plugins, name, answers=results.answers, run=run)


def of_choice(results: Results, plugins: Plugins, choice: Mapping[str, str], run: str | None = None) -> str:
    """Write the tables that a choice fits, each under a heading; an empty text where there is none.

    `place` and the sizes choose tables: `{"place": "torch/cpu", "tokens": "1024"}`. `rows` chooses those that have all
    of its rows, named by label without blanks and joined by a bar, and shows these in brief: `baseline|checkpoint`.
    Each names its machine and the `run`, unless that is None.
    """
    sizes = {key: value for key, value in choice.items() if key != "rows"}
    tables = [
        table
        for table in results.tables
        if all(str({**table.case.shape, "place": table.case.place}.get(key)) == value for key, value in sizes.items())
    ]
    if "rows" not in choice:
        return markdown(tables, plugins, level="####", run=run) if tables else ""
    tokens = tokens_per_step(tables, plugins)
    labels = set(choice["rows"].split("|"))
    title_of = titles_of(table.case for table in tables)
    pieces = []
    for table in tables:
        rows = tuple(row for row in table.rows if row.label.replace(" ", "") in labels)
        if len(rows) == len(labels):
            title = escaped(title_of[table.case.comparison_key])
            origin = [] if run is None else _origin(table, run)
            pieces += [f"#### {title}", *origin, _grid(replace(table, rows=rows), tokens, BRIEF)]
    return "\n\n".join(pieces)


def tokens_per_step(tables: Sequence[Comparison], plugins: Plugins) -> dict[str, int]:
    """Return the tokens of a step by group, where they are known."""
    tokens = {table.case.comparison_key: _tokens(table.case, plugins) for table in tables}
    return {group: count for group, count in tokens.items() if count is not None}


def _tokens(case: Case, plugins: Plugins) -> int | None:
    """Return the tokens of a step; None for a record of a workload or shape that is no longer known."""
    workload = plugins.workloads.get(case.workload)
    try:
        return None if workload is None else workload.tokens_per_step(shape_of(plugins, case))
    except ValidationError:
        return None


def tokens_of(row: Row, tokens_per_step: Mapping[str, int]) -> float | None:
    """Return the tokens of a step of a row: those that were counted where batches differ in size, without padding."""
    counted = (record.extra["tokens_per_step"] for record in row.records if "tokens_per_step" in record.extra)
    return next(counted, tokens_per_step.get(row.case.comparison_key))


def markdown(
    tables: Sequence[Comparison],
    plugins: Plugins,
    title: str = "",
    level: str = "##",
    answers: Sequence[Answer] = (),
    run: str | None = None,
    title_of: Mapping[str, str] | None = None,
) -> str:
    """Write all tables as markdown, each under a heading of a level; figures are rounded here and nowhere else.

    Each names its machine and the `run`, unless that is None and all are of one machine. `title_of` has the headings by
    the keys of comparisons, where others belong to these.
    """
    pieces = [f"# {escaped(title)}"] if title else []
    machines = dict.fromkeys(name for table in tables for name in table.machines)
    title_of = {**titles_of(table.case for table in tables), **(title_of or {})}
    tokens = tokens_per_step(tables, plugins)
    for table in tables:
        pieces.append(f"{level} {escaped(title_of[table.case.comparison_key])}")
        if run is not None or (len(machines) > 1 and table.machines):
            pieces += _origin(table, run or "")
        reason = _untested(table)
        if reason is None:
            pieces += [*filter(None, [sentence(table, plugins.strategies)]), _grid(table, tokens)]
            pieces += [*table.notes, *_remarks(table)]
        else:
            pieces += [f"Untested: {with_code(reason)}.", *_predicted(table)]
    if answers:
        places = [] if run is None else [*machines, *filter(None, [run])]
        where = f", measured on {escaped(' and '.join(places))}" if places else ""
        pieces += [f"{level} Claims{where}", claimed(answers)]
    return "\n\n".join(pieces) + "\n"


def _origin(table: Comparison, run: str) -> list[str]:
    """Return a sentence on the machine of a comparison, and on its run; none where neither is known."""
    _, machine = key_of(table)
    where = ", ".join(filter(None, (machine, run)))
    return [f"{'Measured' if table.machines else 'Tried'} on {escaped(where)}."] if where else []


def claimed(answers: Sequence[Answer]) -> str:
    """Write one row for each claim: what is claimed, the verdict, and the figures."""
    rows = [(escaped(a.claim.id), escaped(a.claim.says), a.verdict, escaped(a.reason)) for a in answers]
    headers = ("claim", "says", "verdict", "figures")
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def _untested(table: Comparison) -> str | None:
    """Return why nothing of a comparison could be measured here, or None when something was."""
    if not all(row.status in ("unsupported", "open") for row in table.rows):
        return None
    if any(row.status == "open" for row in table.rows):
        return "its cases were not run yet"
    return "; ".join(dict.fromkeys(reason for row in table.rows for reason in row.reasons))


def _predicted(table: Comparison) -> list[str]:
    """Show what is known of a place that this machine lacks: the predictions."""
    rows = [
        (
            row_name(row.label),
            mib(peak),
            mib(row.at_most_bytes),
            mib(row.prediction.prediction.predicted_host_bytes if row.prediction is not None else None),
            escaped(phase_name(row.predicted_phase)),
            f"{peak / row.floor_bytes:.1f}" if row.floor_bytes else "",
        )
        for row in table.rows
        if (peak := row.predicted_bytes) is not None
    ]
    headers = ("strategy", PREDICTED, AT_MOST, HOST, "peak in", "x floor")
    aligned = ("left", "right", "right", "right", "left", "right")
    sure = sureness(row.at_most_coverage for row in table.rows)
    shown = [each for each in (_pipe(headers, aligned, rows), sure) if each] if rows else []
    return [*shown, *_unpredicted(table)]


def _unpredicted(table: Comparison) -> list[str]:
    """Say of the rows without a prediction why they have none, those of one reason together."""
    labels: dict[str, list[str]] = {}
    for row in table.rows:
        missing = row.prediction.missing if row.prediction is not None else {}
        if (reason := missing.get("predicted_peak_bytes")) is not None:
            labels.setdefault(reason, []).append(row.label)
    names = [(", ".join(each) if len(each) < len(table.rows) else "all", reason) for reason, each in labels.items()]
    lines = [f"- {escaped(name)}: no prediction: {with_code(reason)}" for name, reason in names]
    return ["\n".join(lines)] if lines else []


def _cells(row: Row, tokens_per_step: "dict[str, int]") -> list[str]:
    tokens = tokens_of(row, tokens_per_step)
    return [
        row_name(row.label),
        _peak(row),
        _memory(row),
        mib(row.host_bytes),
        _native(row),
        mib(row.predicted_bytes),
        mib(row.at_most_bytes),
        residual(row.residual_bytes, row.residual_ratio, row.peak_bytes, row.predicted_bytes),
        "" if row.floor_ratio is None else f"{row.floor_ratio:.1f}",
        escaped(phase_name(row.peak_phase)),
        f"{tokens / row.step_seconds:,.0f}" if tokens and row.step_seconds else "",
        "" if row.fetch_seconds is None else f"{row.fetch_seconds * 1e3:,.2f}",
        _time(row),
        escaped(row.answer or ""),
        row.verdict,
    ]


def _grid(table: Comparison, tokens_per_step: "dict[str, int]", names: Sequence[str] = HEADERS) -> str:
    """Write the rows of one comparison, without the waits for batches where none matters."""
    waits = any((row.fetch_seconds or 0.0) > FETCH_SHARE * (row.step_seconds or 0.0) > 0 for row in table.rows)
    columns = [at for at, name in enumerate(HEADERS) if name in names and (waits or name != FETCH)]
    cells = [_cells(row, tokens_per_step) for row in table.rows]
    rows = [[row[at] for at in columns] for row in cells]
    return _pipe([HEADERS[at] for at in columns], [ALIGNED[at] for at in columns], rows)


def filled_columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the positions of the columns without those of `SPARSE` of which no row has anything."""
    return [at for at, name in enumerate(headers) if name not in SPARSE or any(row[at] for row in rows)]


def _pipe(headers: Sequence[str], aligned: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write rows, without empty columns."""
    columns = filled_columns(headers, rows)
    return tabulate(
        [[row[at] for at in columns] for row in rows],
        [headers[at] for at in columns],
        tablefmt="pipe",
        colalign=[aligned[at] for at in columns],
        disable_numparse=True,
    )


def _peak(row: Row) -> str:
    if row.status == "ok":
        return mib(row.peak_bytes)
    if row.status == "oom_budget" and row.case.budget_bytes:
        return f"> {row.case.budget_bytes / MIB:,.0f}"
    return row.status


def _native(row: Row) -> str:
    """Show the peaks of the timed processes, whose allocator is as the system has it, and their ratio."""
    if row.native_bytes is None:
        return ""
    span = "-".join(dict.fromkeys(map(mib, row.native_bytes)))
    return span if row.native_ratio is None else f"{span}, {row.native_ratio:.2f} x"


def _memory(row: Row) -> str:
    """Show the ratio of peaks and its word; nothing for a baseline."""
    if row.peak_ratio is None or row.case.is_baseline:
        return ""
    return f"{row.peak_ratio:.2f} x" + (f", {row.memory}" if row.memory else "")


def _time(row: Row) -> str:
    """Show the ratio of step times, its interval and its word, and what would decide it."""
    speed = row.speed
    if speed is None:
        return ""
    if speed.standard_error is None:
        seen = speed if speed.rounds > 1 else f"{speed.ratio:.2f} x"
        return f"{seen}, {rounds(speed.rounds)}: open"
    more = ""
    if speed.word not in DECIDED and speed.more_rounds:
        more = f": about {speed.more_rounds} more round{'s' if speed.more_rounds > 1 else ''}"
    return f"{speed}, {speed.word}{more}"


def _remarks(table: Comparison) -> Iterable[str]:
    """Return the lines below a table, for what its cells cannot hold: failures, wrong answers, flags."""
    measured = [row for row in table.rows if row.status == "ok"]
    several = len(measured) > 1  # what one row has is not of all
    shared = set.intersection(*(set(row.flags) for row in measured)) if several else set()
    common = [note for note in measured[0].notes if all(note in row.notes for row in measured)] if several else []
    everyone = [*common, *([f"flags: {', '.join(sorted(shared))}"] if shared else [])]
    lines = [line for line in (sureness(row.at_most_coverage for row in table.rows),) if line]
    lines += [f"- all: {escaped('; '.join(everyone))}"] if everyone else []
    for row in table.rows:
        remarks = [*row.reasons, *(note for note in row.notes if note not in common)]
        repeated = any(reason.startswith(row.answer_reason) for reason in row.reasons)  # one error ended both
        if row.answer in WRONG:
            remarks.append(f"{row.answer}: {row.answer_reason}")
        elif row.answer is None and row.answer_reason and not repeated:
            remarks.append(f"no answer: {row.answer_reason}")
        if own := [flag for flag in row.flags if flag not in shared]:
            remarks.append(f"flags: {', '.join(own)}")
        if remarks:
            lines.append(f"- {escaped(row.label)}: {escaped('; '.join(remarks))}")
    lines += _contributions(table)
    return ["\n".join(lines)] if lines else []


def _contributions(table: Comparison) -> Iterable[str]:
    """Yield for each combination what it would take more without each member, where those rows are there too.

    A combination on ranks is held against rows on as many ranks, and against the row of one process where there is
    none on ranks, as for what divides nothing.
    """
    peaks = {_members(row.case): row.peak_bytes or 0 if row.status == "ok" else 0 for row in table.rows}
    for row in table.rows:
        ranks, members = _members(row.case)
        rest = [members[:at] + members[at + 1 :] for at in range(len(members))]
        without = [peaks.get((ranks, each), peaks.get((1, each), 0)) for each in rest]
        peak = peaks[ranks, members]
        if len(members) < 2 or not peak or not all(without):
            continue
        parts = [
            f"without {member}: {_more(other - peak, row.resolution)}"
            for member, other in zip(members, without, strict=True)
        ]
        yield f"- {escaped(row.label)}: {escaped('; '.join(parts))}"


def _members(case: Case) -> tuple[int, tuple[str, ...]]:
    return case.ranks, tuple(map(str, case.strategies))


def _more(difference: int, resolution: int) -> str:
    """Say by how much a peak differs from another, where the meter can tell."""
    if abs(difference) <= resolution:
        return "as much"
    return f"{mib(abs(difference))} MiB {'more' if difference >= 0 else 'less'}"
