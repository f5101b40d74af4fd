"""Ship the latest records of each suite in the wheel, without pages and pictures, and seconds to three digits.

What a suite gave at earlier commits stays in the repository. Steps of one process and its waits for batches scatter by
far more than three digits show; waits under a millisecond, by more than two. Pilots, which found how many steps to
time, the operators that a prediction counted and what stood at its peak are in no table. So the wheel is a third
smaller.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DIGITS, OF_SHORT, SHORT = 3, 2, 1e-3
"""Digits of seconds, those of a wait that is short, and up to how many seconds it is."""
UNSHOWN = (("prediction", "predicted_work"), ("prediction", "predicted_standing"), ("memory", "batches_digests"))
"""Figures that no report of results shows."""


class ShippedResults(BuildHookInterface):  # type: ignore[type-arg]
    """Puts `results/` into `harness/shipped/results` of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":  # an editable install reads the checkout
            return
        self.slim = tempfile.TemporaryDirectory()
        latest = {path.parent: path for path in sorted(Path(self.root, "results").rglob("*.jsonl"))}
        for path in latest.values():
            name = path.relative_to(self.root)
            copy = Path(self.slim.name, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            copy.write_text("".join(map(_shortened, _standing(lines))), "utf-8")
            build_data["force_include"][str(copy)] = f"harness/shipped/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self.slim.cleanup()


def _standing(lines: list[str]) -> list[str]:
    """Return lines without the predictions that a later one has taken the place of."""
    cases = [_predicted(line) for line in lines]
    last = {case: at for at, case in enumerate(cases)}
    return [line for at, (case, line) in enumerate(zip(cases, lines, strict=True)) if case is None or last[case] == at]


def _predicted(line: str) -> str | None:
    """Return the case that a line is a prediction of; None for any other line."""
    try:
        slot = json.loads(line).get("slot") or {}
    except ValueError:
        return None
    return slot["case"] if slot.get("kind") == "predict" else None


def _shortened(line: str) -> str:
    """Return a record with its seconds rounded and without what is not shown, and nothing of a pilot.

    A line that is no record stays as it is.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if (record.get("slot") or {}).get("kind") == "pilot":
        return ""
    for room, name in UNSHOWN:
        (record.get(room) or {}).pop(name, None)
    for room in (record.get("times") or {}, record.get("origin") or {}):
        room.update({name: _rounded(value, name) for name, value in room.items() if name.endswith("_seconds")})
    compact = json.dumps(record, separators=(",", ": "))
    return compact.replace(",", ", ", 1) + "\n"  # it begins as in the repository


def _rounded(value: Any, name: str) -> Any:
    """Round seconds, or each of a list of them; what is not known stays so."""
    if isinstance(value, list):
        return [_rounded(each, name) for each in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.{OF_SHORT if name == 'fetch_seconds' and value < SHORT else DIGITS}g}")
