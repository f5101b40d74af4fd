"""Where figures are from, in one sentence."""

from harness.records import Origin, Record
from harness.report import provenance


def of(*commits: str, of_suites: bool = False) -> str:
    records = [Record(origin=Origin(commit=commit, utc="2026-11-24T12:00:00")) for commit in commits]
    return provenance.line(records, of_suites)


def test_few_commits_are_named_and_many_are_counted() -> None:
    assert of("a1", "b2", "a1") == "*Predicted 2026-11-24 at commit `a1` and `b2`.*"
    many = "a1", "b2", "c3", "d4"
    assert of(*many, of_suites=True) == "*Predicted 2026-11-24 at 4 commits (each suite names its own).*"
    assert of(*many) == "*Predicted 2026-11-24 at commit `a1` and `b2` and `c3` and `d4`.*", "that is what stands there"
    assert of() == ""
