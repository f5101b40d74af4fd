"""Tables of published runs against their predictions: errors by source and by estimator, then run by run."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tabulate import tabulate

MIB = 1 << 20
PROCESS = "nvml_max_minus_first"
"""What the driver counted of a process above its first sample, in rows that have nothing of the allocator."""
RIVALS = ("xMem", "DNNMem", "SchedTune", "LLMem")
"""Estimators whose answers were published with those rows."""
SOURCES = ("source", "runs", "predicted", "allocated: median, largest error", "reserved", "the source's own estimate")
RUNS = ("run", "card", "published MiB", "predicted MiB", "error")
ESTIMATES = ("whole process", "runs", "median, largest error", "runs that took more")
PROCESSES = (*RUNS, "at most MiB", "xMem's error")

Run = tuple[dict[str, Any], dict[str, Any]]
"""A published row, and the line of what is predicted of it."""


def is_measured(row: dict[str, Any]) -> bool:
    """Check whether a row says what was measured, and of which run of whom, so that it can stand in a table."""
    measured, source = row.get("measured"), row.get("source")
    if not isinstance(measured, dict) or not isinstance(source, dict):
        return False
    return "repo" in source and "group" in row and bool({PROCESS, "max_memory_allocated"} & measured.keys())


def errors(runs: Sequence[Run]) -> str:
    """Write the errors by source, and those of whole processes beside the published estimates of others."""
    of_processes = [run for run in runs if PROCESS in run[0]["measured"]]
    pieces = [_sources([run for run in runs if PROCESS not in run[0]["measured"]])]
    return "\n\n".join(pieces + ([_estimates(of_processes), _failures(of_processes)] * bool(of_processes)))


def runs(runs: Sequence[Run]) -> str:
    """Write each run: what torch's allocator counted, then what whole processes took."""
    cells = []
    for row, line in runs:
        if PROCESS not in row["measured"]:
            measured, got = row["measured"]["max_memory_allocated"], line.get("allocated_bytes")
            published = f"{measured / MIB:,.2f}" if measured else ""
            error = f"{got / measured - 1:+.3%}" if got and measured else line.get("refused", "")
            predicted = f"{got / MIB:,.2f}" if got else ""
            cells.append((row["group"].replace("|", " ").replace('"', ""), _card(row), published, predicted, error))
    processes = [_process(row, line) for row, line in runs if PROCESS in row["measured"]]
    return "\n\n".join([_grid(cells, RUNS, 2)] + [_grid(processes, PROCESSES, 2)] * bool(processes))


def _sources(runs: Sequence[Run]) -> str:
    cells = []
    for source in dict.fromkeys(row["source"]["repo"] for row, _ in runs):
        own = [run for run in runs if run[0]["source"]["repo"] == source]
        known = [(row["measured"], line, _rivals(row)) for row, line in own if "refused" not in line]
        cells.append(
            (
                source,
                len(own),
                len(known),
                _error((each["max_memory_allocated"], line["allocated_bytes"]) for each, line, _ in known),
                _error((each.get("max_memory_reserved"), line["reserved_bytes"]) for each, line, _ in known),
                _error(_own_estimate(each, rivals) for each, _, rivals in known),
            )
        )
    return _grid(cells, SOURCES, 1)


def _rivals(row: dict[str, Any]) -> dict[str, Any]:
    """Return the estimates of others that were published with a row."""
    return row.get("rivals") or {}


def _own_estimate(measured: dict[str, Any], rivals: dict[str, Any]) -> tuple[int | None, int | None]:
    if "fitcheck_tensors" in rivals:
        return measured["max_memory_allocated"], rivals["fitcheck_tensors"]
    return measured.get("max_memory_reserved"), rivals.get("canifinetune_total") or rivals.get("canifinetune_reserved")


def _estimates(runs: Sequence[Run]) -> str:
    known = [(row, line) for row, line in runs if row["measured"][PROCESS] and "process_bytes" in line]
    estimates = {
        "predicted here": [line["process_bytes"] for _, line in known],
        "at most, here": [line["at_most_bytes"] for _, line in known],
        **{rival: [_rivals(row).get(rival) for row, _ in known] for rival in RIVALS},
    }
    cells = []
    for name, sizes in estimates.items():
        pairs = [(row["measured"][PROCESS], size) for (row, _), size in zip(known, sizes, strict=True) if size]
        cells.append((name, len(pairs), _error(pairs), sum(measured > size for measured, size in pairs)))
    return _grid(cells, ESTIMATES, 1)


def _failures(runs: Sequence[Run]) -> str:
    """Say how many runs that ran out of memory were predicted to, and how many of the others."""
    failed = [bool(line.get("oom")) for row, line in runs if row["measured"].get("oom")]
    others = [bool(line.get("oom")) for row, line in runs if not row["measured"].get("oom")]
    return (
        f"Of {len(failed)} such runs that ran out of memory {sum(failed)} are predicted to, "
        f"and of the {len(others)} others {sum(others) or 'none'}."
    )


def _process(row: dict[str, Any], line: dict[str, Any]) -> tuple[str, ...]:
    measured, rival = row["measured"][PROCESS], _rivals(row).get("xMem")
    name = " ".join(row["group"].split("|")[:3])
    cells = ("out of memory" if line.get("oom") else line.get("refused", ""), "", "")
    if "process_bytes" in line:
        got, most = line["process_bytes"], line["at_most_bytes"]
        cells = (f"{got / MIB:,.0f}", f"{got / measured - 1:+.1%}" if measured else "", f"{most / MIB:,.0f}")
    published = f"{measured / MIB:,.0f}" if measured else "out of memory" if row["measured"].get("oom") else ""
    other = f"{rival / measured - 1:+.1%}" if rival and measured else ""
    return name, _card(row), published, *cells, other


def _card(row: dict[str, Any]) -> str:
    return str(row["gpu"]).split(" (")[0]


def _error(pairs: Iterable[tuple[int | None, int | None]]) -> str:
    known = [abs(size / measured - 1) for measured, size in pairs if measured and size]
    return f"{median(known):.3%}, {max(known):.2%}" if known else ""


def _grid(cells: Sequence[Sequence[object]], heads: Sequence[str], texts: int) -> str:
    """Write a table whose first columns are texts."""
    aligned = ["left"] * texts + ["right"] * (len(heads) - texts)
    return tabulate(cells, heads, tablefmt="pipe", colalign=aligned, disable_numparse=True)
