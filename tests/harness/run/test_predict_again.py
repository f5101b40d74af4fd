"""Committed results count as a whole run of their suite."""

from pathlib import Path

import pytest

from harness.records import store

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["whole_run", "checkpointing"])
def test_runs_with_and_without_an_evaluation_have_a_loss_of_each_step(name: str) -> None:
    records = [record for file in (ROOT / "results" / name).rglob("*.jsonl") for record in store.read(file)[0]]
    trained = [record for record in records if record.memory.losses and record.status == "ok"]
    assert {len(record.step_losses) for record in trained} == {3}, "suites take the peak of three steps"
    assert any(len(record.memory.losses) == 4 for record in trained) == (name == "whole_run")
