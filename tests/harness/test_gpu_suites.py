"""Suites of a GPU: what is timed there has a baseline that fits, and what cannot fit is skipped, not tried."""

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import yaml

from harness.contract import plugins
from harness.machine import facts
from harness.machine.gpu import Gpu
from harness.records import Case, Prediction, Record, Slot
from harness.run import bench, predictions, session
from harness.run.schedule import Summary
from harness.suite import reader
from harness.suite.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
LOADED = plugins.load()
CARD = 79 << 30
"""What a card of 80 GB can give."""
PREDICTED = {"losses"}
"""Suites whose sizes on a GPU are those that documents name: claims read what is predicted there."""
SUITES = [
    path
    for path in sorted((ROOT / "suites").glob("*.yaml"))
    if any("cuda" in place for place in yaml.safe_load(path.read_text()).get("places", ()))
]


SLOW = {"kv_cache"}
"""Suites whose predictions take seconds."""


@cache
def plan_of(path: Path) -> Plan:
    return reader.read(path, LOADED)


def timed(path: Path) -> list[Case]:
    """List the baselines on torch/cuda with which rows of a suite are compared in time."""
    plan = plan_of(path)
    if not plan.suite.rounds or path.stem in PREDICTED:
        return []
    return [each.baseline for each in plan.comparisons if str(each.baseline.place) == "torch/cuda"]


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", *SLOW])
def test_baselines_with_which_times_are_compared_fit_a_card_of_80_gb(slow: bool) -> None:
    suites = {path.stem: timed(path) for path in SUITES if (path.stem in SLOW) == slow}
    assert {name for name, cases in suites.items() if cases} >= (SLOW if slow else {"gpu", "gpu_losses"})
    cases = [case for each in suites.values() for case in each]
    predicted = list(predictions.of_cases(cases, {}, LOADED))
    assert len(predicted) == len(cases)
    for case, record in predicted:
        assert record.prediction.predicted_peak_bytes is not None, record.missing
        fits = record.prediction.predicted_peak_bytes <= facts.DEVICE_SHARE * CARD
        assert fits, f"{case.label} at {case.shape}"


def test_peers_whose_kernels_take_16_bits_stand_with_them() -> None:
    seen = 0
    for path in SUITES:
        for case in plan_of(path).cases:
            names = [applied.name for applied in case.strategies]
            seen += "cce_loss" in names
            assert "cce_loss" not in names or "bfloat16" in names, f"{path.stem}: {case.label}"
    assert seen


# What does not fit


def guarded(monkeypatch: pytest.MonkeyPatch, need: int, budget: int | None, card: Gpu | None) -> Record | None:
    """Ask a run what it makes of a case on torch/cuda that needs so much."""
    monkeypatch.setattr(session.gpu, "detect", lambda: card)
    case = Case(workload="decoder", shape={}, place="torch/cuda", corpus="drawn", tokenizer="none", budget_bytes=budget)

    class Digests:
        def digest(self, case: Case) -> str:
            return "case"

    latest = {Slot(case="case", kind="predict"): Summary("ok", need_bytes=need)}
    run = object.__new__(session.Session)
    run.schedule, run.latest, run.options = Digests(), latest, bench.Options(Path("results"))  # type: ignore[assignment]
    return run.over_memory(case)


def test_a_case_that_its_gpu_cannot_hold_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("a card", CARD, CARD, "580.1")
    record = guarded(monkeypatch, 95 << 30, None, card)
    assert record is not None and record.status == "skipped_guard"
    assert record.evidence["limit_bytes"] == int(CARD * facts.DEVICE_SHARE)
    assert guarded(monkeypatch, 60 << 30, None, card) is None
    assert guarded(monkeypatch, 95 << 30, 10 << 30, card) is None, "its budget ends it before the card does"


def test_the_segments_of_a_case_count(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("a card", CARD, CARD, "580.1")
    figures = Prediction(predicted_peak_bytes=60 << 30, predicted_reserved_bytes=78 << 30)
    assert guarded(monkeypatch, Summary.of(Record(prediction=figures)).need_bytes, None, card) is not None


def test_what_another_program_has_taken_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("a card", CARD, 20 << 30, "580.1")
    assert guarded(monkeypatch, 30 << 30, None, card) is not None
    assert guarded(monkeypatch, 10 << 30, None, card) is None


def test_where_nothing_is_known_of_the_gpu_all_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert guarded(monkeypatch, 950 << 30, None, None) is None
    instance = dataclasses.replace(Gpu("a card", CARD, CARD, "580.1"), mig=True)
    assert guarded(monkeypatch, 950 << 30, None, instance) is None
