"""What documents say is answered by the claims of all results, and never by more than was measured."""

from pathlib import Path

import pytest

from harness.records import Applied, Case, Claim, Memory, Phase, Record
from harness.report import documents as sentences
from harness.report import first
from harness.verdicts import documents
from harness.verdicts.claims import Answer
from harness.verdicts.documents import SuiteResults
from harness.verdicts.expressions import ClaimError
from harness.verdicts.judge import Comparison, Row

MIB = 1 << 20
TEXT = """
documents: {A: Windows, B: Models}
sentences:
  - {id: A1, says: it halves the memory, why: because}
  - {id: A2, says: it is as fast and right, by: [A2 fast, A2 right], figures: {A2 fast: its time}}
  - {id: A3, says: nobody looked}
  - {id: B1, says: it takes 60 MiB, suite: mine, that: peak(checkpoint) <= 60 * 1048576}
"""


def read(tmp_path: Path, text: str = TEXT) -> documents.Documents:
    path = tmp_path / "sentences.yaml"
    path.write_text(text)
    return documents.read(path)


def found(*verdicts: tuple[str, str], folder: str = "mine", peak: int = 50 * MIB) -> SuiteResults:
    case = Case(workload="w", shape={}, place="torch/cpu", corpus="c", tokenizer="t")
    memory = Record(memory=Memory(phases=(Phase(name="loss", entry_bytes=0, peak_bytes=peak, exit_bytes=0),)))
    row = Row(case.model_copy(update={"strategies": (Applied(name="checkpoint"),)}), "ok", peak, records=(memory,))
    answers = [Answer(Claim(id=id, says=f"{id}?", that="1 < 2"), verdict, "told") for id, verdict in verdicts]
    return SuiteResults(folder, [Comparison(case, (row,))], answers)


def test_each_sentence_is_decided_by_its_own_claims(tmp_path: Path) -> None:
    known = read(tmp_path)
    results = [
        found(("A1", "verified"), ("A1 more", "refuted"), ("A10", "refuted"), ("A2 fast", "verified")),
        found(("A2 right", "refuted"), folder="other", peak=100 * MIB),
    ]
    one, two, three, four = documents.answered(known, results)
    assert [answer.claim.id for answer, _ in one.answers] == ["A1", "A1 more"] and one.verdict == "verified"
    assert [suite for _, suite in two.answers] == ["mine", "other"] and two.verdict == "in part"
    assert (three.answers, three.verdict) == ((), "untested")
    assert four.verdict == "verified" and four.answers[0][0].reason == "50 MiB, at most 60 MiB"
    text = sentences.text(known, [one, two, three, four])
    assert text.startswith("Of 4 sentences: 2 verified, 1 in part, 1 untested.")
    assert "- A1: because" in text and "### B. Models" in text


def test_the_question_of_a_sentence_may_use_a_former_name(tmp_path: Path) -> None:
    known = read(tmp_path, TEXT.replace("peak(checkpoint)", "peak(every_layer)"))
    *_, unknown = documents.answered(known, [found()])
    *_, known_as = documents.answered(known, [found()], {"every_layer": "checkpoint"})
    assert (unknown.verdict, known_as.verdict) == ("untested", "verified")


def test_a_claim_stands_with_the_sentence_that_names_most_of_its_words(tmp_path: Path) -> None:
    more = TEXT + "  - {id: A1 slow, says: it is slow}\n  - {id: A4, says: so it is, by: [A1 slow twice]}\n"
    results = found(("A1", "verified"), ("A1 slow", "verified"), ("A1 slow twice", "refuted"), ("A1 slower", "refuted"))
    ids = {
        each.sentence.id: [answer.claim.id for answer, _ in each.answers]
        for each in documents.answered(read(tmp_path, more), [results])
    }
    assert ids["A1"] == ["A1", "A1 slower"] and ids["A1 slow"] == ["A1 slow", "A1 slow twice"]
    assert ids["A4"] == ["A1 slow twice"], "what decides a sentence stands with it too"


def test_the_first_page_shows_the_figure_of_the_claim_that_is_named_first(tmp_path: Path) -> None:
    results = [found(("A2 right", "verified"), folder="a", peak=1), found(("A2 fast", "verified"), folder="b", peak=1)]
    text = first.sentences(documents.answered(read(tmp_path), results))
    assert "| its time: told |" in " ".join(text.split())


def test_the_first_page_says_what_the_deciding_figure_is(tmp_path: Path) -> None:
    def row(*verdicts: tuple[str, str]) -> str:
        return first.sentences(documents.answered(read(tmp_path), [found(*verdicts)])).splitlines()[3]

    assert "| its time: told" in row(("A2 fast", "refuted"), ("A2 right", "refuted"))
    assert "| told" in row(("A2 fast", "verified"), ("A2 right", "in part")), "the one that came out as the sentence"
    assert "its time" not in row(("A2 fast", "untested"), ("A2 right", "untested")), "there is no figure"


def test_what_holds_in_part_of_a_claim_holds_in_part_of_the_sentence(tmp_path: Path) -> None:
    known = read(tmp_path)
    assert documents.answered(known, [found(("A1", "in part"))])[0].verdict == "in part"
    both = [found(("A1", "verified")), found(("A1", "refuted"), folder="other")]
    assert documents.answered(known, both)[0].verdict == "in part"


def test_doubt_of_one_claim_is_doubt_of_the_sentence(tmp_path: Path) -> None:
    known = read(tmp_path)
    results = [found(("A2 fast", "verified"), ("A2 right", "inconclusive"))]
    assert documents.answered(known, results)[1].verdict == "inconclusive"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT.replace("id: A3", "id: C3"), "'C3' is of no document"),
        (TEXT.replace("id: A3", "id: A1"), "'A1' is the id of several sentences"),
        (TEXT.replace("A2 fast: its time", "A2 slow: its time"), "'A2': `figures` names 'A2 slow'"),
        (TEXT.replace(", suite: mine", ""), "'B1': give both `suite` and `that`"),
        (TEXT.replace("says: nobody looked", "sais: nobody"), "line 6"),
        ("sentences: [", "sentences.yaml"),
        (TEXT.replace("<= 60 * 1048576", ""), "compares nothing"),
    ],
)
def test_a_file_that_says_nothing_is_refused_in_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ClaimError) as caught:
        documents.answered(read(tmp_path, text), [found()])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_hostile_sentences_are_inert(tmp_path: Path) -> None:
    known = read(tmp_path, TEXT.replace("nobody looked", '"<script>alert(1)</script> | \\"x\\" [a](b)"'))
    text = sentences.text(known, documents.answered(known, []))
    assert "<script" not in text and "[a](b)" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count(" | ") for line in rows if "---" not in line and "A" in line[:8]}) == 1
