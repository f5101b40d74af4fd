"""What documents say and what was measured, as one table for each document."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from harness.report.text import escaped
from harness.verdicts.documents import Documents, Sentence

HEADERS = ("", "it says", "verdict", "measured", "suite")
ORDER = ("verified", "in part", "refuted", "inconclusive", "untested")


def text(documents: Documents, sentences: Sequence[Sentence], level: str = "###") -> str:
    """Write how many sentences came out how, then a table for each document, and below it why."""
    counts = Counter(sentence.verdict for sentence in sentences)
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict]]
    pieces = [f"Of {len(sentences)} sentences: {', '.join(verdicts)}."]
    for letter, title in documents.documents.items():
        members = [sentence for sentence in sentences if sentence.said.id[0] == letter]
        if not members:
            continue
        pieces.append(f"{level} {letter}. {escaped(title)}")
        rows = [row for sentence in members for row in _rows(sentence)]
        pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", disable_numparse=True))
        reasons = [f"- {escaped(each.said.id)}: {escaped(each.said.why)}" for each in members if each.said.why]
        pieces.append("\n".join(reasons))
    return "\n\n".join(filter(None, pieces)) + "\n"


def _rows(sentence: Sentence) -> Iterator[tuple[str, ...]]:
    """Yield one row where one answer is all there is, else one for the sentence and one for each answer."""
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
