"""What documents say and what was measured, as one table for each document."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from harness.report.text import escaped, with_code
from harness.verdicts.documents import Documents, Judgement

HEADERS = ("", "it says", "verdict", "measured", "suite")
ORDER = ("verified", "in part", "refuted", "inconclusive", "untested")


def text(documents: Documents, judgements: Sequence[Judgement], level: str = "###") -> str:
    """Write how many sentences came out how, then a table for each document, and below it why."""
    counts = Counter(each.verdict for each in judgements)
    verdicts = [f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict]]
    pieces = [f"Of {len(judgements)} sentences: {', '.join(verdicts)}."]
    for letter, title in documents.documents.items():
        members = [each for each in judgements if each.sentence.id[0] == letter]
        if not members:
            continue
        pieces.append(f"{level} {letter}. {escaped(title)}")
        rows = [row for each in members for row in _rows(each)]
        pieces.append(tabulate(rows, HEADERS, tablefmt="pipe", disable_numparse=True))
        sentences = [each.sentence for each in members if each.sentence.why]
        pieces.append("\n".join(f"- {escaped(sentence.id)}: {with_code(sentence.why)}" for sentence in sentences))
    return "\n\n".join(filter(None, pieces)) + "\n"


def _rows(judgement: Judgement) -> Iterator[tuple[str, ...]]:
    """Yield one row where one answer is all there is, else one for the sentence and one for each answer."""
    sentence = judgement.sentence
    head = f"**{escaped(sentence.id)}**", f"**{escaped(sentence.says)}**", f"**{judgement.verdict}**"
    if [answer.claim.id for answer, _ in judgement.answers] == [sentence.id]:
        ((answer, suite),) = judgement.answers
        yield *head, escaped(answer.reason), escaped(suite)
        return
    yield *head, "", ""
    for answer, suite in judgement.answers:
        claim = answer.claim
        yield escaped(claim.id), escaped(claim.says), answer.verdict, escaped(answer.reason), escaped(suite)
