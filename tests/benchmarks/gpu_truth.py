"""Predict published GPU runs without a GPU: `python tests/benchmarks/gpu_truth.py ROWS.jsonl` prints a line for each.

A row says what was run and what was measured, as those of tests/benchmarks/published/rows.jsonl do. The line has its
`id`, the predicted bytes (allocated and reserved of torch's allocator, the driver's view of the process, and what it
takes at most) and the seconds that it took, or `refused` with the reason. With `--into docs/gpu_predictions.md` the
errors are written there, by source.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from published import operators, training
from published.machine import Refused, card_of

from harness.backends.cuda_allocator import OutOfMemory

MIB = 1 << 20
BEGIN, END = "<!-- gpu truth -->", "<!-- end of gpu truth -->"
FAMILIES = {
    "liger-op": operators.predicted,
    "apple-cce": operators.predicted,
    "fitcheck": training.predicted,
    "canifinetune": training.predicted,
    "xmem": training.predicted_process,
    "xmem-a100": training.predicted_process,
}
"""How the rows of each source are rebuilt."""
PROCESS = "nvml_max_minus_first"
"""What the driver counted of a process above its first sample, in rows that have nothing of the allocator."""
RIVALS = ("xMem", "DNNMem", "SchedTune", "LLMem")
"""Estimators whose answers were published with those rows."""


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """Predict one row; whatever fails is its reason."""
    start = time.perf_counter()
    figures: dict[str, Any] = {"id": row.get("id")}
    try:
        if row.get("family") not in FAMILIES:
            raise Refused(f"rows of '{row.get('family')}' say too little of what was run")
        figures |= FAMILIES[row["family"]](row)
        if "process_bytes" not in figures:
            context = card_of(row).context_bytes
            figures["process_bytes"] = figures["reserved_bytes"] + context if context is not None else None
            figures["at_most_bytes"] = None  # too few runs of this kind were measured for a bound
    except OutOfMemory as error:
        figures |= {"oom": True, "refused": f"out of memory on this card: {error}"}
    except Refused as error:
        figures["refused"] = str(error)
    except Exception as error:
        figures["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return figures | {"seconds": round(time.perf_counter() - start, 2)}


def table(rows: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> str:
    """Write the errors by source, then row by row; a rival is the estimate of those who measured."""
    by_id = {line["id"]: line for line in predicted}
    of_processes = [row for row in rows if PROCESS in row["measured"]]
    rows = [row for row in rows if PROCESS not in row["measured"]]
    sources: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sources.setdefault(row["source"]["repo"], []).append(row)
    heads = [
        "| source | runs | predicted | allocated: median, largest error | reserved | the source's own estimate |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for source, own in sources.items():
        known = [(row["measured"], by_id[row["id"]], row["rivals"]) for row in own if "refused" not in by_id[row["id"]]]
        heads.append(
            f"| {source} | {len(own)} | {len(known)} "
            f"| {_errors((each['max_memory_allocated'], line['allocated_bytes']) for each, line, _ in known)} "
            f"| {_errors((each.get('max_memory_reserved'), line['reserved_bytes']) for each, line, _ in known)} "
            f"| {_errors(_rival(each, rivals) for each, _, rivals in known)} |"
        )
    lines = ["| run | card | published MiB | predicted MiB | error |", "|:--|:--|--:|--:|--:|"]
    for row in rows:
        measured, line = row["measured"]["max_memory_allocated"], by_id[row["id"]]
        got = line.get("allocated_bytes")
        shown = f"{got / MIB:,.2f} | {got / measured - 1:+.3%}" if got else f"| {line['refused']}"
        name = row["group"].replace("|", " ").replace('"', "")
        lines.append(f"| {name} | {row['gpu'].split(' (')[0]} | {measured / MIB:,.2f} | {shown} |")
    tables = [heads, lines, *(_processes(of_processes, by_id) if of_processes else ())]
    return "\n\n".join("\n".join(each) for each in tables)


def _processes(rows: list[dict[str, Any]], by_id: dict[str, dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """Write what whole processes took, beside the estimates that were published with them."""
    known = [row for row in rows if row["measured"][PROCESS] and "process_bytes" in by_id[row["id"]]]
    estimates: dict[str, list[tuple[int, int | None]]] = {
        "predicted here": [(row["measured"][PROCESS], by_id[row["id"]]["process_bytes"]) for row in known],
        "at most, here": [(row["measured"][PROCESS], by_id[row["id"]]["at_most_bytes"]) for row in known],
    }
    for rival in RIVALS:
        estimates[rival] = [(row["measured"][PROCESS], row["rivals"].get(rival)) for row in known]
    heads = ["| estimate | runs | median, largest error | runs that took more |", "|:--|--:|--:|--:|"]
    for name, pairs in estimates.items():
        given = [(measured, estimate) for measured, estimate in pairs if estimate]
        died = sum(measured > estimate for measured, estimate in given)
        heads.append(f"| {name} | {len(given)} | {_errors(given)} | {died} |")
    lines = [
        "| run | card | published MiB | predicted MiB | error | at most MiB | xMem's error |",
        "|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        measured, line, rival = row["measured"][PROCESS], by_id[row["id"]], row["rivals"].get("xMem")
        name = f"{row['group'].rpartition('|')[0].rpartition('|')[0].replace('|', ' ')}"
        published = f"{measured / MIB:,.0f}" if measured else "out of memory" if row["measured"]["oom"] else ""
        cells = ["out of memory" if line.get("oom") else line["refused"], "", ""]
        if "process_bytes" in line:
            got, most = line["process_bytes"], line["at_most_bytes"]
            cells = [f"{got / MIB:,.0f}", f"{got / measured - 1:+.1%}" if measured else "", f"{most / MIB:,.0f}"]
        other = f"{rival / measured - 1:+.1%}" if rival and measured else ""
        lines.append(f"| {name} | {row['gpu'].split(' (')[0]} | {published} | {' | '.join(cells)} | {other} |")
    said = [
        f"Of {sum(row['measured']['oom'] for row in rows)} runs that ran out of memory "
        f"{sum(bool(row['measured']['oom'] and by_id[row['id']].get('oom')) for row in rows)} are predicted to, and "
        f"{sum(bool(not row['measured']['oom'] and by_id[row['id']].get('oom')) for row in rows)} of the others."
    ]
    return heads, said, lines


def _rival(measured: dict[str, Any], rivals: dict[str, Any]) -> tuple[int | None, int | None]:
    if "fitcheck_tensors" in rivals:
        return measured["max_memory_allocated"], rivals["fitcheck_tensors"]
    return measured.get("max_memory_reserved"), rivals.get("canifinetune_total") or rivals.get("canifinetune_reserved")


def _errors(pairs: Iterable[tuple[int | None, int | None]]) -> str:
    errors = [abs(got / measured - 1) for measured, got in pairs if measured and got]
    return f"{median(errors):.3%}, {max(errors):.2%}" if errors else ""


def insert(document: Path, text: str) -> None:
    """Put the table between its marks in a document."""
    before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: list[str]) -> None:
    if len(arguments) not in (1, 3) or arguments[1:2] not in ([], ["--into"]):
        sys.exit(__doc__)
    rows = [json.loads(text) for text in Path(arguments[0]).read_text(encoding="utf-8").splitlines()]
    predicted = []
    for row in rows:
        predicted.append(line_of(row))
        print(json.dumps(predicted[-1]), flush=True)
    if len(arguments) == 3:
        insert(Path(arguments[2]), table(rows, predicted))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
