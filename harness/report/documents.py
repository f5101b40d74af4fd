"""What documents say and what was measured, as one table for each document."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from harness.report.table import escaped
from harness.verdicts.documents import Documents, Sentence

HEADERS = ("", "it says", "verdict", "measured", "suite")
ORDER = ("verified", "in part", "refuted", "inconclusive", "untested")


def text(documents: Documents, found: Sequence[Sentence], level: str = "###") -> str:
    """Write how many sentences came out how, then a table for each document, and below it why."""
    counts = Counter(sentence.verdict for sentence in found)
    told = [f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict]]
    pieces = [f"Of {len(found)} sentences: {', '.join(told)}."]
    for letter, title in documents.documents.items():
        own = [sentence for sentence in found if sentence.said.id[0] == letter]
        if not own:
            continue
        pieces.append(f"{level} {letter}. {escaped(title)}")
        rows = [row for sentence in own for row in _rows(sentence)]
        pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", disable_numparse=True))
        why = [f"- {escaped(each.said.id)}: {escaped(each.said.why)}" for each in own if each.said.why]
        pieces.append("\n".join(why))
    return "\n\n".join(filter(None, pieces)) + "\n"


def _rows(sentence: Sentence) -> Iterator[tuple[str, ...]]:
    """Give one row where one answer is all there is, else one for the sentence and one for each answer."""
    said = sentence.said
    head = f"**{escaped(said.id)}**", f"**{escaped(said.says)}**", f"**{sentence.verdict}**"
    if [answer.claim.id for answer, _ in sentence.answers] == [said.id]:
        ((answer, suite),) = sentence.answers
        yield *head, escaped(answer.reason), escaped(suite)
        return
    yield *head, "", ""
    for answer, suite in sentence.answers:
        claim = answer.claim
        yield escaped(claim.id), escaped(claim.says), answer.verdict, escaped(answer.reason), escaped(suite)
