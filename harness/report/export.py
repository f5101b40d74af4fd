"""Every figure of every row as plain values, for spreadsheets, programs and charts."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from harness.report.composition import composition
from harness.report.table import tokens_of
from harness.report.text import cell
from harness.report.words import Key, key_of, titles
from harness.verdicts.choice import stands_in
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.observed import step_time

Figures = dict[str, Any]


def of_tables(
    suite: str,
    tables: Sequence[Comparison],
    tokens_per_step: Mapping[str, int],
    title_of: Mapping[Key, str] | None = None,
) -> list[Figures]:
    """Return one flat mapping for each row: bytes, seconds and ratios as numbers, unknown ones as None.

    These are the comparisons of one run. They have their titles among all of their suite; by default these are all.
    """
    title_of = title_of or titles({key_of(table): table.case for table in tables})
    begun = min((record.origin.utc for table in tables for row in table.rows for record in row.records), default="")
    return [
        _of_row(suite, title_of[key_of(table)], table, row, tokens_of(row, tokens_per_step)) | {"run_utc": begun}
        for table in tables
        for row in table.rows
    ]


def as_json(rows: Sequence[Figures]) -> str:
    """Write an array with an object for each row."""
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def as_csv(rows: Sequence[Figures]) -> str:
    """Write a line for each row below the names of all figures; no text is a formula, or obeyed by a terminal.

    What is nested is JSON.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _in_csv(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _in_csv(value: Any) -> Any:
    if isinstance(value, str):
        return cell(value)
    return json.dumps(value, allow_nan=False) if isinstance(value, dict | list) else value


def _of_row(suite: str, title: str, table: Comparison, row: Row, tokens: float | None) -> Figures:
    case, speed, seconds = row.case, row.speed, row.step_seconds
    interval = speed.inferred if speed is not None else None
    first, largest = next(iter(row.records), None), row.largest
    phases = largest.memory.phases if largest and case.place.device == "cpu" else ()  # they are of the host
    children = (row.peak_bytes or 0) - ((largest and largest.peak_bytes) or row.peak_bytes or 0)
    return {
        "suite": suite,
        "comparison": title,
        "workload": case.workload,
        "place": str(case.place),
        "strategy": row.label,
        "status": row.status,
        "verdict": row.verdict,
        "answer": row.answer,
        "answer_reason": row.answer_reason,
        "stand_in": stands_in(row),
        "peak_bytes": row.whole_peak_bytes,
        "peak_ratio": row.peak_ratio,
        "peak_phase": row.peak_phase,
        "memory": row.memory,
        "host_bytes": row.host_bytes,
        "native_peak_bytes_low": row.native_bytes[0] if row.native_bytes else None,
        "native_peak_bytes_high": row.native_bytes[1] if row.native_bytes else None,
        "native_peak_ratio": row.native_ratio,
        "predicted_bytes": row.predicted_bytes,
        "at_most_bytes": row.at_most_bytes,
        "at_most_coverage": row.at_most_coverage,
        "residual_bytes": row.residual_bytes,
        "residual_ratio": row.residual_ratio,
        "floor_bytes": row.floor_bytes,
        "floor_ratio": row.floor_ratio,
        "budget_bytes": case.budget_bytes,
        "step_seconds": seconds,
        "first_step_seconds": _first_step(row),
        "fetch_seconds": row.fetch_seconds,
        "tokens_per_second": tokens / seconds if tokens and seconds else None,
        "time_ratio": speed.ratio if speed else None,
        "time_ratio_low": interval.low if interval else None,
        "time_ratio_high": interval.high if interval else None,
        "rounds": speed.rounds if speed else None,
        "time": speed.word if speed else None,
        "more_rounds": speed.more_rounds if speed else None,
        "phases": {phase.name: phase.peak_bytes for phase in phases},
        "composition": composition(phases, row.peak_phase, children),
        "ranks": case.ranks,
        "rank_peaks": [rank.peak_bytes for rank in largest.memory.ranks if rank.peak_bytes] if largest else [],
        "round_ratios": _round_ratios(row, table),
        "flags": ", ".join(row.flags),
        "notes": "; ".join(row.notes),
        "reasons": "; ".join(row.reasons),
        "corpus": case.corpus,
        "tokenizer": case.tokenizer,
        "seed": case.seed,
        "machine": str(first.origin.machine.get("name", "")) if first else "",
        "commit": first.origin.commit if first else "",
        "shape": {name: value for name, value in case.shape.items() if value is not None},
    }


def _first_step(row: Row) -> float | None:
    """Return the median first step, in which a compiler may have worked."""
    seconds = [record.times.first_step_seconds for record in row.records if record.times.first_step_seconds]
    return median(seconds) if seconds else None


def _round_ratios(row: Row, table: Comparison) -> list[float]:
    """Return the step time of each round as a multiple of the mean of baseline and control in the same round.

    The control's own are multiples of the baseline's, as its ratio is.
    """
    if row.case.is_baseline:
        return []
    others = [each for each in table.rows if each.case.is_baseline or (each.case.is_control and each is not row)]
    own, anchors = _by_round(row), [_by_round(each) for each in others]
    return [
        own[at] / geometric_mean(seconds)
        for at in sorted(own)
        if (seconds := [each[at] for each in anchors if at in each])
    ]


def _by_round(row: Row) -> dict[tuple[int, int], float]:
    """Return the step time of each process in seconds, by round and block."""
    return {
        (record.slot.round, record.slot.block): seconds
        for record in row.records
        if record.slot is not None and (seconds := step_time(record)) is not None
    }
