"""Figures as services that follow benchmarks over time take them."""

import json
from collections.abc import Sequence
from typing import Any

from harness.report.export import Figures

MIB = 1 << 20


def bencher(rows: Sequence[Figures]) -> str:
    """Write Bencher's metric format: for each row its peak in bytes and its step in nanoseconds, with known bounds.

    https://bencher.dev/docs/reference/bencher-metric-format/
    """
    benchmarks: dict[str, dict[str, Any]] = {}
    for row in rows:
        metrics: dict[str, Any] = {}
        if row["status"] == "ok" and row["peak_bytes"]:
            metrics["peak-memory"] = {"value": row["peak_bytes"]}
        if row["step_seconds"]:
            metrics["latency"] = {"value": row["step_seconds"] * 1e9}
            if (bounds := _bounds(row)) is not None:
                metrics["latency"] |= {"lower_value": bounds[0] * 1e9, "upper_value": bounds[1] * 1e9}
        if metrics:
            benchmarks[name(row)] = metrics
    return json.dumps(benchmarks, indent=1, allow_nan=False) + "\n"


def benchmark_action(rows: Sequence[Figures]) -> str:
    """Write what github-action-benchmark reads as `customSmallerIsBetter`: two entries a row.

    https://github.com/benchmark-action/github-action-benchmark
    """
    entries: list[dict[str, Any]] = []
    for row in rows:
        about = {"extra": f"{row['verdict']}, answer {row['answer'] or 'not known'}, commit {row['commit']}"}
        if row["status"] == "ok" and row["peak_bytes"]:
            entries.append({"name": f"{name(row)}: peak", "unit": "MiB", "value": row["peak_bytes"] / MIB, **about})
        if row["step_seconds"]:
            entry = {"name": f"{name(row)}: step", "unit": "ms", "value": row["step_seconds"] * 1e3}
            if (bounds := _bounds(row)) is not None:
                entry["range"] = f"± {(bounds[1] - bounds[0]) / 2 * 1e3:.3g}"
            entries.append({**entry, **about})
    return json.dumps(entries, indent=1, allow_nan=False) + "\n"


def name(row: Figures) -> str:
    """Return what identifies a row over time: its suite, its comparison and its strategies."""
    return f"{row['suite']} / {row['comparison']} / {row['strategy']}"


def _bounds(row: Figures) -> tuple[float, float] | None:
    """Return the step time at both ends of the interval of its ratio; None where there is no interval."""
    ratio, seconds = row["time_ratio"], row["step_seconds"]
    if not ratio or row["time_ratio_low"] is None:
        return None
    return seconds * row["time_ratio_low"] / ratio, seconds * row["time_ratio_high"] / ratio
