"""The first page: whether what decided a result has changed since, and which figure stands for a sentence."""

from harness.contract import plugins
from harness.machine import history
from harness.records import Applied, Case, Heading, Origin, Record
from harness.records.case import Claim
from harness.report import first
from harness.report.results import Results
from harness.verdicts.claims import Answer
from harness.verdicts.documents import Judgement, Sentence
from harness.verdicts.judge import Comparison, Row
from harness.verdicts.remedies import JudgedRow, Remedy

GONE = "0" * 12
"""A commit that no history has."""


def said(code):
    case = Case(
        workload="decoder",
        shape={"tokens": 64},
        place="torch/cpu",
        corpus="zipf",
        tokenizer="bytes",
        strategies=(Applied(name="chunked_loss"),),
    )
    origin = Origin(commit=GONE, utc="2026-01-01T00:00:00+00:00")
    records = [Record(heading=Heading(code=code), origin=origin), Record(case=case, origin=origin)]
    return first.since([Results("small", "small", tuple(records))], plugins.load().strategies)


def test_where_the_commit_is_gone_digests_of_the_code_decide():
    code = history.digests(["strategies/loss/chunked_loss.py"])
    assert said({}) == "not known"
    assert said(code) == "the same"
    assert said(code | {"strategies/loss/chunked_loss.py": "other"}) == "**stale**: `strategies/loss/chunked_loss.py`"
    assert said(code | {"harness/worker/memory.py": "other"}) == "measured by other code: `harness/worker/memory.py`"


def test_the_figure_of_a_sentence_that_holds_in_part_is_one_that_failed():
    def answer(name, verdict):
        return Answer(Claim(id=name, says=name, that="peak(baseline) > 0"), verdict, f"figure of {name}"), "suite"

    said = Sentence(id="A1", says="it is so", by=["A1", "A1 too"], figures={"A1 too": "the second"})
    in_part = Judgement(said, (answer("A1", "verified"), answer("A1 too", "refuted")))
    assert in_part.verdict == "in part"
    assert "the second: figure of A1 too" in first.sentences([in_part])
    holds = Judgement(said, (answer("A1", "verified"), answer("A1 too", "verified")))
    assert "figure of A1 " in first.sentences([holds])


def test_where_it_does_not_help_is_told_apart_from_where_it_does():
    def judged(tokenizer, folder="vocabulary"):
        case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer=tokenizer)
        row = Row(case, status="ok", peak_ratio=0.5)
        return JudgedRow(folder, Comparison(case, (row,)), row)

    def helps(*idle):
        remedy = Remedy("the width", "torch", judged("words"), idle, 4, True)
        return first.use([remedy], "").splitlines()[-1].rpartition("|")[0].rpartition("|")[2].strip()

    assert helps() == "4 of 4"
    elsewhere = "3 of 4; not in [losses](losses/README.md), 64 tokens"
    assert helps(judged("bytes", "losses")) == elsewhere, "a page alone says which"
    of_bytes = "3 of 4; not in [vocabulary](vocabulary/README.md), 64 tokens, bytes"
    assert helps(judged("bytes")) == of_bytes, "the best row is of that page and length"
