"""What a run notes of its batches is of the batches that it reads."""

import math

import numpy as np
import pytest

from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case, Task
from harness.run import runner
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


PLUGIN = """
from dataclasses import replace
import numpy as np
from harness import Holding, Strategy, hookimpl

def by_content(parts):
    def order(parts, source, epoch):
        often = np.bincount(np.asarray(source.inputs), minlength=source.vocabulary)
        means = [often[source.inputs[at : at + source.window]].mean() for at in source.starts(np.arange(source.count))]
        return lambda start, stop: np.argsort(means, kind="stable")[start:stop]
    return replace(parts, order=order)

def failing(parts):
    calls = []
    def order(parts, source, epoch):
        calls.append(epoch)
        if len(calls) > 1:
            raise KeyError("gone")
        return lambda start, stop: np.arange(start, stop)
    return replace(parts, order=order)

def endless(parts):
    inner = parts.init
    def init(parts, source=None):
        parts.notes.update(ratio=float("nan"), half=np.float32(0.5))
        return {**inner(parts, source), "least": float("inf")}
    return replace(parts, init=init)

@hookimpl
def harness_strategies():
    order = {"feeds": "reordered", "holds": lambda extent: Holding()}
    return [Strategy("by_content", ("order",), {"torch": by_content}, "Order by content.", **order),
            Strategy("failing", ("order",), {"torch": failing}, "Fail the second time.", **order),
            Strategy("endless", ("init",), {"torch": endless}, "Note what no record holds.")]
"""


@pytest.fixture
def measured(tmp_path):
    """Return what measures, or predicts, a strategy of the plugin, and the case and the plugins of it."""
    path = tmp_path / "noting.py"
    path.write_text(PLUGIN)
    loaded = plugins.load((str(path),))
    shape = loaded.workloads["decoder"].shape(layers=1, width=32, heads=2, vocabulary=128, batch=4, tokens=32)

    def measured(name, kind="memory"):
        where = {"place": "torch/cpu", "corpus": "drawn", "tokenizer": "none"}
        case = Case(workload="decoder", shape=shape.model_dump(), strategies=(Applied(name=name),), **where)
        task = Task(kind=kind, cases=(case,), run_id="notes", parent=0, folder="", plugins=(str(path),))
        (record,) = runner.run(task, 1, 120.0)
        return record, case, loaded

    return measured


def test_an_order_by_content_is_judged_on_the_rows_themselves(measured):
    record, case, loaded = measured("by_content")
    parts = assemble(loaded, case)
    source = parts.source(parts)
    order = parts.order(parts, source, 0)(0, source.count)
    assert record.status == "ok", record.evidence
    assert record.extra["shuffle_quality"] == pytest.approx(shuffle_quality.quality(order)) and record.peak_bytes


def test_an_order_that_fails_after_the_run_is_a_note(measured):
    record, *_ = measured("failing")
    assert record.status == "ok" and record.peak_bytes
    assert record.notes["order"] == "cannot be looked at (KeyError: 'gone')"


@pytest.mark.parametrize("kind", ["memory", "predict"])
def test_numbers_that_are_not_finite_cost_no_figure(measured, kind):
    record, *_ = measured("endless", kind)
    assert record.status == "ok", record.evidence
    assert record.extra["half"] == 0.5 and not {"ratio", "least"} & record.extra.keys()
    if kind == "memory":
        assert (record.notes["ratio"], record.notes["least"]) == ("nan", "inf") and record.memory.losses


def test_notes_are_words_and_finite_numbers():
    noted = {"word": "so", "one": 1, "half": np.float32(0.5), "none": None, "endless": math.inf, "list": [1]}
    assert notes.by_kind(noted) == ({"word": "so", "endless": "inf", "list": "[1]"}, {"one": 1, "half": 0.5})
