"""The suites of this project hang together: their claims name their rows, and results that are tracked are theirs."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

from harness.contract import plugins
from harness.contract.assembly import shape_of
from harness.records import Case, Claim, store
from harness.suite.plan import Plan
from harness.suite.reader import read
from harness.verdicts import documents
from harness.verdicts.claims import refuse
from harness.verdicts.expressions import ClaimError

ROOT = Path(__file__).resolve().parents[1]
SUITES = sorted(path for path in (ROOT / "suites").glob("*.yaml") if path.name != "claims.yaml")
FITTED = {"batch_limits", "pythia_batch", "ram_to_tokens"}
"""Suites that `harness fit` alone answers: their claims are about limits within budgets that it is given."""
STALE = {
    "advice": "`harness advise` answers it by predictions alone",
    "gpu": "a machine with a GPU was there for one round of times",
    "smoke": "it is a look at everything in a minute, and no table shows it",
}


@cache
def loaded() -> plugins.Plugins:
    return plugins.load()


@cache
def plan(path: Path) -> Plan:
    return read(path, loaded())


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_each_claim_names_rows_and_sizes_of_its_suite(path: Path) -> None:
    cases = [group.cases for group in plan(path).comparisons]
    refuse(plan(path).suite.claims, cases, path.name)
    for claim in plan(path).suite.claims:
        misspelt = claim.model_copy(update={"where": {**claim.where, "no_such_size": 1}})
        with pytest.raises(ClaimError, match="no_such_size 1"):
            refuse([misspelt], cases, path.name)


def test_each_sentence_of_the_documents_is_answered_by_a_claim_of_a_suite() -> None:
    known = {claim.id for path in SUITES for claim in plan(path).suite.claims}
    unanswered = []
    for sentence in documents.read(ROOT / "suites" / "claims.yaml").sentences:
        assert sentence.figures.keys() == set(sentence.deciding), "what is measured is not said"
        if not sentence.that:
            unanswered += [name for name in sentence.deciding if name not in known]
    assert not unanswered


def test_what_a_sentence_of_the_documents_asks_of_a_suite_names_its_rows_and_sizes() -> None:
    asking = [each for each in documents.read(ROOT / "suites" / "claims.yaml").sentences if each.that]
    assert asking
    for sentence in asking:
        claim = Claim(id=sentence.id, says=sentence.says, that=sentence.that, where=sentence.where)
        groups = plan(ROOT / "suites" / f"{sentence.suite}.yaml").comparisons
        refuse([claim], [group.cases for group in groups], f"claims.yaml, of {sentence.suite}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    subprocess.run([ROOT / ".ci" / "tracked_results", folder], cwd=ROOT, check=True)
    return folder / "results"


ALL = 0
"""A vocabulary of all tokens that a corpus has, which a record has counted."""


def as_asked(case: Case) -> Case:
    """Return the case of a record with the vocabulary that its suite asked for: all tokens."""
    return case.model_copy(update={"shape": case.shape | {"vocabulary": ALL}})


def as_today(case: Case) -> Case:
    """Return the case of a record with the sizes that its workload has had since."""
    shape = shape_of(loaded(), case).model_dump()
    return case.model_copy(update={"shape": shape})


def drift(path: Path, results: Path) -> str | None:
    """Return how the results of a suite differ from its rows, or None where each has its own and there are no more."""
    if not any((results / path.stem).rglob("*.jsonl")):
        return "it was never measured"
    due = {case.digest(): case for case in plan(path).cases}
    counted = {case.tokenizer for case in due.values() if case.shape.get("vocabulary") == ALL}
    for file in store.newest(results / path.stem):
        records, _ = store.read(file, loaded().aliases)
        cases = [
            as_today(record.case)
            for record in records
            if record.case and record.slot and record.slot.kind in ("memory", "predict")
        ]
        known = {(as_asked(case) if case.tokenizer in counted else case).digest(): case for case in cases}
        if absent := [case.label for key, case in due.items() if key not in known]:
            return f"no result of {absent[0]}"
        if extra := [case.label for key, case in known.items() if key not in due]:
            return f"a result of {extra[0]}, which is none of its rows"
        rounds = {record.heading.rounds for record in records if record.heading.rounds}
        if rounds and plan(path).suite.rounds not in rounds:
            return f"measured in {max(rounds)} rounds instead of {plan(path).suite.rounds}"
    return None


@pytest.mark.parametrize("path", [each for each in SUITES if each.stem not in FITTED], ids=lambda path: path.stem)
def test_no_row_lacks_its_prediction_for_want_of_a_package(path: Path, results: Path) -> None:
    folder = results / path.stem
    for file in store.newest(folder) if folder.exists() else []:
        for record in store.read(file)[0]:
            reason = record.missing.get("predicted_peak_bytes", "")
            assert "not installed" not in reason, f"{record.case.label}: {reason}: install it, and predict anew"


@pytest.mark.parametrize("path", [each for each in SUITES if each.stem not in FITTED], ids=lambda path: path.stem)
def test_every_row_of_a_suite_has_its_result_and_none_more(path: Path, results: Path) -> None:
    difference = drift(path, results)
    if path.stem in STALE:
        assert difference is not None, f"its results are those of the suite: take '{path.stem}' out of STALE"
        pytest.skip(STALE[path.stem])
    assert difference is None, f"{difference}: measure the suite anew, or name it among STALE with the reason"
