"""Predict published GPU runs without a GPU: `python tests/benchmarks/gpu_truth.py ROWS.jsonl` prints a line for each.

A row says what was run and what was measured, as those of tests/benchmarks/published/rows.jsonl do. The line has its
`id`, the predicted bytes (allocated and reserved of torch's allocator, the driver's view of the process, and what that
is at most) and the seconds that it took, or `refused` with the reason. Documents after `--into` get the errors, by
source and by run, between their marks.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from published import operators, tables, training
from published.machine import Refused, card_of

from harness.backends.cards import CARDS
from harness.backends.cuda_allocator import OutOfMemory

FAMILIES = {
    "liger-op": operators.predicted,
    "apple-cce": operators.predicted,
    "fitcheck": training.predicted,
    "canifinetune": training.predicted,
    "xmem": training.predicted_process,
    "xmem-a100": training.predicted_process,
}
"""How the rows of each source are rebuilt."""
SEGMENTS = 1.1
"""By how much reserved bytes can exceed the predicted ones: loaders with several threads leave segments otherwise.

42 of 43 published runs lie below it.
"""


def line_of(row: dict[str, Any], number: int = 1) -> dict[str, Any]:
    """Predict one row; whatever fails is its reason. `number` is that of its line."""
    start = time.perf_counter()
    figures: dict[str, Any] = {"id": row.get("id")}
    try:
        if "family" not in row:
            raise Refused(
                f"line {number} is no row: a row is a JSON object with a family, a config and what was measured"
            )
        if row["family"] not in FAMILIES:
            raise Refused(f"rows of '{row['family']}' say too little of what was run")
        figures |= FAMILIES[row["family"]](row)
        if "process_bytes" not in figures:
            context = card_of(row).context_bytes
            figures["process_bytes"] = figures["reserved_bytes"] + context if context is not None else None
            most = max(card.context_bytes or 0 for card in CARDS.values()) if context is None else context
            figures["at_most_bytes"] = int(SEGMENTS * figures["reserved_bytes"]) + most
    except OutOfMemory as error:
        figures |= {"oom": True, "refused": f"out of memory on this card: {error}"}
    except Refused as error:
        figures["refused"] = str(error)
    except KeyError as error:
        figures["refused"] = f"line {number} has no {error}, which rows of its family need"
    except Exception as error:
        figures["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return figures | {"seconds": round(time.perf_counter() - start, 2)}


def insert(document: Path, mark: str, text: str) -> None:
    """Put a text between its marks in a document, where the document has them."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    whole = document.read_text(encoding="utf-8")
    if begin in whole:
        before, _, rest = whole.partition(begin)
        document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def _row(text: bytes) -> dict[str, Any]:
    """Return the row of a line; one without fields where the line is no JSON object, which is refused as such."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {}


def main(arguments: list[str]) -> None:
    path, *into = arguments or sys.exit(__doc__)
    if into[:1] not in ([], ["--into"]) or len(into) == 1:
        sys.exit(__doc__)
    runs: list[tables.Run] = []
    for number, text in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if not text.strip():
            continue
        row = _row(text)
        line = line_of(row, number)
        print(json.dumps(line), flush=True)
        if tables.is_measured(row):
            runs.append((row, line))
    for document in map(Path, into[1:]):
        insert(document, "errors of gpu truth", tables.errors(runs))
        insert(document, "runs of gpu truth", tables.runs(runs))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
