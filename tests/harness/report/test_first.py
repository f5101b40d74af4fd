"""The first page: whether what decided a result has changed since, and which figure stands for a sentence."""

from dataclasses import replace

import pytest

from harness.contract import plugins
from harness.machine import history
from harness.records import Applied, Case, Heading, Origin, Record
from harness.records.case import Claim
from harness.report import first
from harness.report.answer import cost
from harness.report.results import Results
from harness.report.words import short
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
    shown = first.sentences([Judgement(said, (answer("A1", "verified"), answer("A1 too", "verified")))])
    assert "figure of A1" in shown and "figure of A1 too" not in shown


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ("2 of 2 comparisons verified", ""),
        ("0 of 3 comparisons verified, 2 refuted, 1 untested", ""),
        ("0 of 2 comparisons verified, 1 refuted, 1 inconclusive", "(0 of 2"),
        ("1 of 2 comparisons verified, 1 refuted", "(1 of 2"),
    ],
)
def test_the_figure_of_a_sentence_says_where_comparisons_came_out_otherwise(counts, shown):
    reason = f"1.45, outside 1.8 to 2.2 ({counts})"
    answer = Answer(Claim(id="A1", says="so", that="peak(baseline) > 0"), "refuted", reason)
    text = first.sentences([Judgement(Sentence(id="A1", says="it is so"), ((answer, "suite"),))])
    assert "1.45, outside 1.8 to 2.2" in text and ("comparisons" in text) == bool(shown) and shown in text


@pytest.mark.parametrize(("ranks", "memory"), [(1, "0.50 x"), (4, "0.50 x on each rank")])
def test_a_share_of_a_rank_is_no_share_of_all(ranks, memory):
    case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer="bytes")
    ranked = case.model_copy(update={"strategies": (Applied(name="fsdp"),), "ranks": ranks})
    row = Row(ranked, status="ok", peak_bytes=50 << 20, peak_ratio=0.5)
    best = JudgedRow("sharding", Comparison(case, (Row(case, status="ok"), row)), row)
    assert first.effect(Remedy("one process", "torch", best, (), 1, True))[1] == memory
    assert cost(row) == memory.replace("0.50 x", "0.50 x the memory")
    assert cost(replace(row, peak_ratio=None)) == memory.replace("0.50 x", "50.0 MiB"), "the baseline does not fit"


@pytest.mark.parametrize(
    ("commit", "shown"),
    [
        ("0123456789ab", "0123456"),
        ("0123456789ab-dirty", "0123456-dirty"),
        ("unversioned", "unversioned"),
    ],
)
def test_a_commit_is_shortened_and_what_is_none_is_not(commit, shown):
    assert short(commit) == shown


def test_where_it_does_not_help_is_told_apart_from_where_it_does():
    def judged(tokenizer, folder="vocabulary"):
        case = Case(workload="decoder", shape={"tokens": 64}, place="torch/cpu", corpus="zipf", tokenizer=tokenizer)
        row = Row(case, status="ok", peak_ratio=0.5)
        return JudgedRow(folder, Comparison(case, (row,)), row)

    def helps(*idle):
        remedy = Remedy("the width", "torch", judged("words"), idle, 4, True)
        return first.use([remedy], "").splitlines()[-1].rpartition("|")[0].rpartition("|")[2].strip()

    assert helps() == "4 of 4"
    remedy = Remedy("the width", "torch", judged("words"), (), 4, True)
    for stale, shown in ((["vocabulary"], "64 tokens, stale |"), (["losses"], "64 tokens |")):
        assert shown in first.use([remedy], "", stale)
    elsewhere = "3 of 4; not in [losses](losses/README.md), 64 tokens"
    assert helps(judged("bytes", "losses")) == elsewhere, "a page alone says which"
    of_bytes = "3 of 4; not in [vocabulary](vocabulary/README.md), 64 tokens, bytes"
    assert helps(judged("bytes")) == of_bytes, "the best row is of that page and length"
    both = f"2{of_bytes[1:]}, and [vocabulary](vocabulary/README.md), 64 tokens, bpe"
    assert helps(judged("bytes"), judged("bpe")) == both
