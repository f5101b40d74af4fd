"""What changed between two runs, as markdown for a pull request."""

from collections import Counter
from collections.abc import Sequence

from tabulate import tabulate

from harness.report.text import escaped, row_name
from harness.report.words import mib, titles
from harness.verbs.compare import BETTER, SAME, UNRESOLVED, WORSE, Change

HEADERS = ("case", "figure", "before", "after", "change", "verdict")
ALIGNED = ("left", "left", "right", "right", "right", "left")
ORDER = (WORSE, UNRESOLVED, BETTER, SAME)


def text(changes: Sequence[Change], notes: Sequence[str], everything: bool = False) -> str:
    """Write what differs, the worst first, under a sentence that counts it; with `everything` what stayed as well."""
    counts = Counter(change.verdict for change in changes)
    pieces = [f"Of {len(changes)} figures: {', '.join(f'{counts[verdict]} {verdict}' for verdict in ORDER)}."]
    if notes:
        pieces.append("\n".join(f"- {escaped(note)}" for note in notes))
    groups: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        if everything or change.verdict != SAME:
            groups.setdefault((change.case.comparison_key, ""), []).append(change)
    title_of = titles({key: members[0].case for key, members in groups.items()})
    for key, members in groups.items():
        rows = [_cells(change) for change in sorted(members, key=lambda change: ORDER.index(change.verdict))]
        pieces.append(f"#### {escaped(title_of[key])}")
        pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", colalign=ALIGNED, disable_numparse=True))
    return "\n\n".join(pieces) + "\n"


def _cells(change: Change) -> tuple[str, ...]:
    verdict = f"{change.verdict} ({escaped(change.reason)})" if change.reason else change.verdict
    ratio = "" if change.ratio is None else f"{change.ratio:.2f} x"
    before, after = _shown(change, change.before), _shown(change, change.after)
    return row_name(change.case.label), change.figure, before, after, ratio, verdict


def _shown(change: Change, value: float | str | None) -> str:
    if isinstance(value, float | int):
        return f"{mib(int(value))} MiB" if change.figure == "peak" else f"{value * 1e3:,.1f} ms"
    return escaped(value or "")
