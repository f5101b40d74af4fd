"""The index of the first page: whether what decided a result has changed since."""

from harness.contract import plugins
from harness.machine import history
from harness.records import Applied, Case, Heading, Origin, Record
from harness.report import first
from harness.report.results import Results

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
