"""Write the figures of `gpu/losses.py` as a table: `python gpu/losses_table.py LOSSES.json --into DOCUMENT`.

It stands between the marks `losses alone` of the document.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

BEGIN, END = "<!-- losses alone -->", "<!-- end of losses alone -->"
MIB = 1 << 20


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table: the first row has the products alone, and the fields with a comma are shapes."""
    alone = rows[0]
    shapes = [field for field in alone if "," in field]
    heads = ["loss"]
    for shape in shapes:
        n, D, V = (int(size) for size in shape.split(","))
        heads += [f"ms: {n:,} x {D:,} x {V:,}", "x products", "MiB"]
    heads += ["error: hidden states", "error: weight"]
    lines = []
    for row in rows:
        cells = [row["loss"]]
        for shape in shapes:
            cells += _measured(row.get(shape, {}), alone[shape].get("milliseconds"))
        lines.append([*cells, *(f"{error:.1e}" for error in row.get("errors", ()))])
    return tabulate(
        lines, heads, tablefmt="pipe", disable_numparse=True, colalign=["left", *["right"] * (len(heads) - 1)]
    )


def _measured(figures: dict[str, Any], products: float | None) -> list[str]:
    """Return the cells of one shape; empty ones where the loss or the products did not run."""
    if "milliseconds" not in figures:
        return ["", "", ""]
    milliseconds = figures["milliseconds"]
    ratio = f"{milliseconds / products:.2f}" if products else ""
    return [f"{milliseconds:.1f}", ratio, f"{figures['peak_bytes'] / MIB:,.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("losses", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    rows = [row for row in json.loads(options.losses.read_text(encoding="utf-8")) if "untested" not in row]
    before, rest = options.into.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    options.into.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
