"""What a run notes of its batches is of the batches that it reads."""

import pytest

from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case, Task
from harness.worker import notes
from harness.workloads.data import shuffle_quality

LOADED = plugins.load()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_order_noted_is_that_of_the_case_s_own_seed(seed):
    shape = {"layers": 1, "vocabulary": 300, "batch": 2, "tokens": 8}
    case = Case(
        workload="decoder",
        shape=LOADED.workloads["decoder"].shape(**shape).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        seed=seed,
        strategies=(Applied(name="random_crop"),),
    )
    parts = assemble(LOADED, case)
    task = Task(kind="memory", cases=(case,), run_id="", parent=0, folder="", steps=2)
    _, numbers = notes.of_run(parts, task, LOADED, None)
    source = parts.source(parts)
    order = parts.order(parts, source, 0)(0, source.count)
    assert numbers["epoch_coverage"] == shuffle_quality.coverage(order, source.count)
    assert numbers["shuffle_quality"] == shuffle_quality.quality(order)
