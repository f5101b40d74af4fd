"""What changed between two runs, as markdown for a pull request."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from harness.records import Case
from harness.report.text import escaped, row_name
from harness.report.words import Key, mib, titles
from harness.verbs.compare import BETTER, NEW, SAME, UNMEASURED, UNRESOLVED, WORSE, Change

HEADERS = ("case", "figure", "before", "after", "change", "verdict")
ALIGNED = ("left", "left", "right", "right", "right", "left")
ORDER = (WORSE, UNRESOLVED, NEW, BETTER, SAME, UNMEASURED)
Group = tuple[str, str, str]
"""What stands under one heading: a suite, a machine and a comparison, by its key."""


def text(changes: Sequence[Change], notes: Sequence[str], everything: bool = False) -> str:
    """Write what differs, the worst first, under a sentence that counts it; with `everything` what stayed as well."""
    counts = Counter(change.verdict for change in changes)
    added = f" New rows: {counts[NEW]}." if counts[NEW] else ""
    judged = [verdict for verdict in ORDER if verdict not in (NEW, UNMEASURED)]
    figures = ", ".join(f"{counts[verdict]} {verdict}" for verdict in judged)
    pieces = [f"Of {sum(counts[verdict] for verdict in judged)} figures: {figures}.{added}"]
    if counts[UNMEASURED]:
        pieces.append(
            f"The new run did not measure times: {counts[UNMEASURED]} rows are compared by memory and answer alone."
        )
    if notes:
        pieces.append("\n".join(f"- {escaped(note)}" for note in notes))
    groups: dict[Group, list[Change]] = {}
    for change in changes:
        if everything or change.verdict not in (SAME, UNMEASURED):
            groups.setdefault((change.suite, change.machine, change.case.comparison_key), []).append(change)
    title_of = _titles(groups, changes)
    for group, members in groups.items():
        rows = [_cells(change) for change in sorted(members, key=_rank)]
        pieces.append(f"#### {escaped(title_of[group])}")
        pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True))
    return "\n\n".join(pieces) + "\n"


def _titles(groups: Mapping[Group, Sequence[Change]], changes: Sequence[Change]) -> dict[Group, str]:
    """Return a title for each group: its comparison, with the suite and the machine where changes are of several."""
    suites, machines = {change.suite for change in changes}, {change.machine for change in changes}
    cases: dict[str, dict[Key, Case]] = {}
    for (suite, _, comparison), members in groups.items():
        cases.setdefault(suite, {})[comparison, ""] = members[0].case
    title_of = {suite: titles(keys) for suite, keys in cases.items()}
    return {
        (suite, machine, comparison): (f"{suite}: " if len(suites) > 1 else "")
        + title_of[suite][comparison, ""]
        + (f", on {machine}" if len(machines) > 1 and machine else "")
        for suite, machine, comparison in groups
    }


def _rank(change: Change) -> tuple[int, float]:
    """Return where a change stands: what became worse first, and of that what has no ratio, as it is not there."""
    return ORDER.index(change.verdict), -(change.ratio or math.inf) if change.verdict == WORSE else 0.0


def _cells(change: Change) -> tuple[str, ...]:
    verdict = f"{change.verdict} ({escaped(change.reason)})" if change.reason else change.verdict
    ratio = "" if change.ratio is None else f"{change.ratio:.2f} x"
    if change.interval is not None:
        ratio += f" ({change.interval.low:.2f}-{change.interval.high:.2f})"
    before, after = _shown(change.before), _shown(change.after)
    return row_name(change.case.label), change.figure, before, after, ratio, verdict


def _shown(value: int | str | None) -> str:
    return f"{mib(value)} MiB" if isinstance(value, int) else escaped(value or "")
