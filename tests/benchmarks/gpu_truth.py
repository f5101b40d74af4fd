"""Predict published GPU runs without a GPU: `python tests/benchmarks/gpu_truth.py ROWS.jsonl` prints a line for each.

A row says what was run and what was measured, as those of docs/gpu_predictions.md do. The line has its `id`, the
predicted bytes (allocated and reserved of torch's allocator, the driver's view of the process) and the seconds that it
took, or `refused` with the reason.
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published import operators, training
from published.machine import Refused, card_of

from harness.backends.cuda_allocator import OutOfMemory

FAMILIES = {
    "liger-op": operators.predicted,
    "apple-cce": operators.predicted,
    "fitcheck": training.predicted,
    "canifinetune": training.predicted,
    "xmem": training.predicted,
    "xmem-a100": training.predicted,
}
"""How the rows of each source are rebuilt."""


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """Predict one row; whatever fails is its reason."""
    start = time.perf_counter()
    figures: dict[str, Any] = {"id": row.get("id")}
    try:
        if row.get("family") not in FAMILIES:
            raise Refused(f"rows of '{row.get('family')}' say too little of what was run")
        figures |= FAMILIES[row["family"]](row)
        context = card_of(row).context_bytes
        figures["process_bytes"] = figures["reserved_bytes"] + context if context is not None else None
    except OutOfMemory as error:
        figures |= {"oom": True, "refused": f"out of memory on this card: {error}"}
    except Refused as error:
        figures["refused"] = str(error)
    except Exception as error:
        figures["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return figures | {"seconds": round(time.perf_counter() - start, 2)}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        yield line_of(json.loads(text))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for line in lines(Path(sys.argv[1])):
        print(json.dumps(line), flush=True)
