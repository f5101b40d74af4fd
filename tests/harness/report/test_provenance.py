"""Where figures are from, in one sentence."""

from typing import Any

from harness.records import Kind, Memory, Origin, Record, Slot
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


def test_commits_that_only_predicted_are_apart_from_those_that_measured() -> None:
    def record(commit: str, kind: Kind, machine: str, **more: Any) -> Record:
        origin = Origin(commit=commit, utc=f"2026-11-2{commit}T12:00:00", machine={"name": machine, "cpus": 2})
        return Record(origin=origin, slot=Slot(case="c", kind=kind), **more)

    run = record("4", "memory", "here", memory=Memory(peak_phase="loss"))
    records = [run, record("4", "predict", "here"), record("5", "predict", "there")]
    text = provenance.line(records)
    assert text.startswith("*Measured 2026-11-24 at commit `4`, on 2 CPUs") and "there" not in text
    assert text.endswith("(here); some predictions at commit `5`.*")
    only = provenance.line(records[1:])
    assert only.startswith("*Predicted 2026-11-24 to 2026-11-25 at commit `4` and `5`, on") and "there" in only
