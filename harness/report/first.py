"""The first page of results: what to use against what sets your peak, what documents say, and where all the rest is."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from tabulate import tabulate

from harness.contract.strategy import Strategy
from harness.machine import history
from harness.records.record import heading_of
from harness.report.provenance import of_records
from harness.report.results import Results
from harness.report.text import code, escaped, row_name, with_code
from harness.report.words import each_rank, short
from harness.verdicts.documents import Judgement
from harness.verdicts.judge import Row
from harness.verdicts.remedies import JudgedRow, Remedy
from harness.verdicts.times import rounds

USE = ("what sets your peak", "use", "on", "memory", "as started", "time", "answer", "measured in", "helps in")
SAID = ("", "it says", "verdict", "measured", "why")
INDEX = ("suite", "what it compares", "rows", "when", "commit", "code since")
STALE = "**stale**"
"""How it begins what has changed since where that was run."""
COUNTED = re.compile(r" \((\d+) of \d+ comparisons verified((?:, \d+ \w+)*)\)$")
"""How a reason ends that speaks of several comparisons."""
SHOWN_IDLE = 2
"""Suites of rows in which a strategy saves nothing that are named; the others are counted."""


def use(remedies: Sequence[Remedy], results: str, stale: Collection[str] = ()) -> str:
    """Write what to use for each thing that sets a peak; `results` is where the suites lie, seen from the document.

    `stale` are the folders of suites whose code has changed since.
    """
    rows = []
    before = ""
    for remedy in remedies:
        rows.append(
            (
                "" if remedy.sets == before else f"**{escaped(remedy.sets)}**",
                row_name(remedy.best.row.label),
                *map(escaped, effect(remedy)),
                _where(remedy.best, results) + ", stale" * (remedy.best.folder in stale),
                helps(remedy, lambda judged: _where(judged, results)),
            )
        )
        before = remedy.sets
    return tabulate(rows, USE, tablefmt="pipe", disable_numparse=True)


def effect(remedy: Remedy) -> tuple[str, ...]:
    """Return where a remedy was measured and what it did: the cells of `USE` from `on` to `answer`."""
    row = remedy.best.row
    return (
        remedy.backend,
        "" if row.peak_ratio is None else f"{row.peak_ratio:.2f} x{each_rank(row)}",
        f"{row.native_ratio:.2f} x" if row.native_ratio is not None else "",
        _time(row),
        (row.answer or "").replace("_", " "),
    )


def _time(row: Row) -> str:
    """Write the ratio of step times with its interval; an empty text where the row was not timed."""
    speed = row.speed
    if speed is None:
        return ""
    if speed.standard_error is None:
        return f"open after {rounds(speed.rounds)}"
    return str(speed)


def length(judged: JudgedRow) -> str:
    """Return the length of the rows that were trained on, after a comma; an empty text where they have none."""
    shape = judged.table.case.shape
    return next((f", {shape[name]:,} {name}" for name in ("tokens", "frames") if shape.get(name)), "")


def _where(judged: JudgedRow, results: str) -> str:
    return f"[{escaped(judged.folder)}]({results}{judged.folder}/README.md){length(judged)}"


def helps(remedy: Remedy, where: Callable[[JudgedRow], str]) -> str:
    """Say in how many rows it saves memory, and of which suites it does not; `where` names the suite of a row."""
    text = f"{remedy.count - len(remedy.idle)} of {remedy.count}"
    if not remedy.idle:
        return text
    alike = any(where(judged) == where(remedy.best) for judged in remedy.idle)
    named = list(dict.fromkeys(where(judged) + _tokenizer(judged) * alike for judged in remedy.idle))
    more = [f"{len(named) - SHOWN_IDLE} more"] if len(named) > SHOWN_IDLE else []
    return f"{text}; not in {', and '.join([*named[:SHOWN_IDLE], *more])}"


def _tokenizer(judged: JudgedRow) -> str:
    """Return how a text was cut, after a comma: it tells comparisons of one length apart."""
    tokenizer = judged.table.case.tokenizer
    return f", {tokenizer}" if tokenizer else ""


def sentences(judgements: Sequence[Judgement]) -> str:
    """Write every sentence of the documents in one row: its verdict, the figure that decided it, and the reason."""
    rows = [
        (escaped(sentence.id), escaped(sentence.says), each.verdict, escaped(_figure(each)), with_code(sentence.why))
        for each in judgements
        for sentence in [each.sentence]
    ]
    return tabulate(rows, SAID, tablefmt="pipe", disable_numparse=True)


def _figure(judgement: Judgement) -> str:
    """Return what was measured: of the first answer that is as the whole sentence, or else of the first refuted one."""
    deciding = judgement.sentence.deciding
    answers = [answer for answer, _ in judgement.answers if answer.claim.id in deciding]
    answers.sort(key=lambda answer: deciding.index(answer.claim.id))
    same = [answer for answer in answers if answer.verdict == judgement.verdict]
    refuted = [answer for answer in answers if answer.verdict == "refuted"]
    answer = next(iter(same or refuted or answers), None)
    if answer is None:
        return ""
    words = judgement.sentence.figures.get(answer.claim.id) if answer.verdict != "untested" else None
    return (f"{words}: " if words else "") + _where_alike(answer.reason)


def _where_alike(reason: str) -> str:
    """Leave out how many comparisons came out how where all that were decided came out alike."""
    counted = COUNTED.search(reason)
    if counted is None:
        return reason
    others = [count for count in counted[2].split(", ") if count and not count.endswith("untested")]
    return reason[: counted.start()] if len(others) + (counted[1] != "0") < 2 else reason


def index(by_folder: Mapping[str, Sequence[Results]], changes: Mapping[str, str], where: str) -> str:
    """Write one row for each suite: what it compares, its commit, and what has changed of its code since.

    Results and changes are by the folder of the suite.
    """
    rows = []
    for folder, members in by_folder.items():
        records = [record for each in members for record in each.records]
        origin = of_records(records)
        title = heading_of(records).title
        rows.append(
            (
                f"[{escaped(folder)}]({where}{folder}/README.md)",
                escaped(title),
                str(sum(len(table.rows) for each in members for table in each.tables)),
                origin.when,
                " ".join(code(short(commit)) for commit in origin.commits),
                changes[folder],
            )
        )
    return tabulate(
        rows, INDEX, tablefmt="pipe", colalign=("left", "left", "right", *["left"] * 3), disable_numparse=True
    )


def since(members: Sequence[Results], strategies: Mapping[str, Strategy]) -> str:
    """Say what does something else now than when some results were measured: what was run, the meter, the predictor."""
    roles = history.since([record for each in members for record in each.records], strategies)
    if roles is None:
        return "not known"
    if roles.run:
        return f"{STALE}: {_first(roles.run)}"
    if roles.measuring:
        return f"measured by other code: {_first(roles.measuring)}"
    return f"predicted by other code: {_first(roles.predicting)}" if roles.predicting else "the same"


def _first(names: Sequence[str]) -> str:
    return f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
