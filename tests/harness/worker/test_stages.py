"""The most that a loss takes lasts until the gradient of its hidden states, whatever is updated meanwhile."""

import os

import pytest

from harness.records import Applied, Case, Task
from harness.run import runner

SHAPE = {"layers": 2, "width": 128, "heads": 4, "vocabulary": 8192, "tokens": 512}
MIB = 1 << 20


def done(kind):
    rewrites = (Applied(name="update_in_backward"),)
    case = Case(
        workload="decoder", shape=SHAPE, place="torch/cpu", corpus="drawn", tokenizer="none", strategies=rewrites
    )
    (record,) = runner.run(Task(kind=kind, cases=(case,), run_id="stages", parent=os.getpid(), folder=""), 1, 120.0)
    assert record.status == "ok", record.evidence
    return record


@pytest.mark.long
def test_updates_in_the_backward_pass_hide_nothing_of_the_loss():
    due, measured = done("predict").prediction.predicted_stages, done("memory").memory.stages
    logits = 4 * SHAPE["tokens"] * SHAPE["vocabulary"]
    assert due["loss"] - due["forward"] > 1.9 * logits
    assert measured["loss"] == pytest.approx(due["loss"], rel=0.05, abs=2 * MIB)
