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

Rows = Sequence[dict[str, Any]]
Lines = dict[str, dict[str, Any]]


def errors(rows: Rows, lines: Lines) -> str:
    """Write the errors by source, and those of whole processes beside the published estimates of others."""
    of_processes = [row for row in rows if PROCESS in row["measured"]]
    pieces = [_sources([row for row in rows if PROCESS not in row["measured"]], lines)]
    return "\n\n".join(
        pieces + ([_estimates(of_processes, lines), _failures(of_processes, lines)] * bool(of_processes))
    )


def runs(rows: Rows, lines: Lines) -> str:
    """Write each run: what torch's allocator counted, then what whole processes took."""
    cells = []
    for row in [row for row in rows if PROCESS not in row["measured"]]:
        measured, line = row["measured"]["max_memory_allocated"], lines[row["id"]]
        got = line.get("allocated_bytes")
        shown = (f"{got / MIB:,.2f}", f"{got / measured - 1:+.3%}") if got else ("", line["refused"])
        cells.append((row["group"].replace("|", " ").replace('"', ""), _card(row), f"{measured / MIB:,.2f}", *shown))
    processes = [_process(row, lines[row["id"]]) for row in rows if PROCESS in row["measured"]]
    return "\n\n".join([_grid(cells, RUNS, 2)] + [_grid(processes, PROCESSES, 2)] * bool(processes))


def _sources(rows: Rows, lines: Lines) -> str:
    cells = []
    for source in dict.fromkeys(row["source"]["repo"] for row in rows):
        own = [row for row in rows if row["source"]["repo"] == source]
        known = [(row["measured"], lines[row["id"]], row["rivals"]) for row in own if "refused" not in lines[row["id"]]]
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


def _own_estimate(measured: dict[str, Any], rivals: dict[str, Any]) -> tuple[int | None, int | None]:
    if "fitcheck_tensors" in rivals:
        return measured["max_memory_allocated"], rivals["fitcheck_tensors"]
    return measured.get("max_memory_reserved"), rivals.get("canifinetune_total") or rivals.get("canifinetune_reserved")


def _estimates(rows: Rows, lines: Lines) -> str:
    known = [row for row in rows if row["measured"][PROCESS] and "process_bytes" in lines[row["id"]]]
    estimates = {
        "predicted here": [lines[row["id"]]["process_bytes"] for row in known],
        "at most, here": [lines[row["id"]]["at_most_bytes"] for row in known],
        **{rival: [row["rivals"].get(rival) for row in known] for rival in RIVALS},
    }
    cells = []
    for name, sizes in estimates.items():
        pairs = [(row["measured"][PROCESS], size) for row, size in zip(known, sizes, strict=True) if size]
        cells.append((name, len(pairs), _error(pairs), sum(measured > size for measured, size in pairs)))
    return _grid(cells, ESTIMATES, 1)


def _failures(rows: Rows, lines: Lines) -> str:
    """Say how many runs that ran out of memory were predicted to, and how many of the others."""
    failed = [row["id"] for row in rows if row["measured"]["oom"]]
    predicted = {row["id"] for row in rows if lines[row["id"]].get("oom")}
    others = len(predicted - set(failed))
    return (
        f"Of {len(failed)} such runs that ran out of memory {len(predicted & set(failed))} are predicted to, "
        f"and of the {len(rows) - len(failed)} others {others or 'none'}."
    )


def _process(row: dict[str, Any], line: dict[str, Any]) -> tuple[str, ...]:
    measured, rival = row["measured"][PROCESS], row["rivals"].get("xMem")
    model, optimizer, batch, *_ = row["group"].split("|")
    cells = ("out of memory" if line.get("oom") else line.get("refused", ""), "", "")
    if "process_bytes" in line:
        got, most = line["process_bytes"], line["at_most_bytes"]
        cells = (f"{got / MIB:,.0f}", f"{got / measured - 1:+.1%}" if measured else "", f"{most / MIB:,.0f}")
    published = f"{measured / MIB:,.0f}" if measured else "out of memory" if row["measured"]["oom"] else ""
    other = f"{rival / measured - 1:+.1%}" if rival and measured else ""
    return f"{model} {optimizer} {batch}", _card(row), published, *cells, other


def _card(row: dict[str, Any]) -> str:
    return str(row["gpu"]).split(" (")[0]


def _error(pairs: Iterable[tuple[int | None, int | None]]) -> str:
    known = [abs(size / measured - 1) for measured, size in pairs if measured and size]
    return f"{median(known):.3%}, {max(known):.2%}" if known else ""


def _grid(cells: Sequence[Sequence[object]], heads: Sequence[str], texts: int) -> str:
    """Write a table whose first columns are texts."""
    aligned = ["left"] * texts + ["right"] * (len(heads) - texts)
    return tabulate(cells, heads, tablefmt="pipe", colalign=aligned, disable_numparse=True)
