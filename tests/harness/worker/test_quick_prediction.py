"""A prediction that leaves out what repeats says the same as one that runs all of it, and asks torch for far less."""

from contextlib import nullcontext

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends import torch_memory, torch_operators
from harness.contract import plugins
from harness.records import Applied, Case, Prediction, Task
from harness.worker import tasks

SMALL = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 512, "batch": 1, "tokens": 512}
ROWS = {
    "adam_8bit": SMALL | {"vocabulary": 150_000, "tokens": 64},
    "native_sparse_attention": SMALL | {"layers": 1, "tokens": 1024},
    "fused_loss": SMALL | {"vocabulary": 8192},
    "cut_loss": SMALL | {"vocabulary": 8192, "tokens": 2048},
    "tiled_feed": SMALL | {"layers": 3, "tokens": 8192},
    "mapped_moments": SMALL,
}
REPEATING = {"adam_8bit": 560, "native_sparse_attention": 2900, "cut_loss": 350, "tiled_feed": 440}
"""Rows of many equal turns, and how many operators torch is asked for at most."""


def predicted(name: str, shape: dict, path: str | None = None) -> Prediction:
    """Predict one row in this process."""
    names = () if path is None else (path,)
    loaded = plugins.load(names)
    case = Case(
        workload="decoder",
        shape=loaded.workloads["decoder"].shape(**shape).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=(Applied(name=name, knobs={}),),
    )
    task = Task(kind="predict", cases=(case,), run_id="quick", parent=0, folder="", steps=2, plugins=names)
    record = tasks.run(task, loaded)
    assert record.status == "ok" and not record.missing, (record.evidence, record.missing)
    return record.prediction


def in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every turn taken, and every operator run."""

    def refuse(*_: object) -> None:
        raise torch_operators.Undescribed

    monkeypatch.setattr(torch_memory, "recorded", lambda recorder: nullcontext())
    monkeypatch.setattr(torch_operators, "described", refuse)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The operators that torch was asked for."""
    operators: list[object] = []
    inner = FakeTensorMode.dispatch

    def dispatch(self: FakeTensorMode, func: object, *rest: object, **named: object) -> object:
        operators.append(func)
        return inner(self, func, *rest, **named)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    return operators


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("name", ROWS)
def test_what_repeats_is_predicted_as_if_it_had_been_run(name, monkeypatch):
    quick = predicted(name, ROWS[name])
    in_whole(monkeypatch)
    assert quick == predicted(name, ROWS[name])


@pytest.mark.parametrize("name", REPEATING)
def test_what_repeats_is_asked_of_torch_once(name, dispatched, monkeypatch):
    predicted(name, ROWS[name])
    assert len(dispatched) <= REPEATING[name]


@pytest.mark.long
def test_the_turns_of_a_longer_loop_are_not_taken(monkeypatch):
    taken: list[int] = []
    inner = torch_operators.Operators.__call__
    monkeypatch.setattr(torch_operators.Operators, "__call__", lambda *args: taken.append(1) or inner(*args))
    predicted("native_sparse_attention", ROWS["native_sparse_attention"])
    short, taken[:] = len(taken), []
    predicted("native_sparse_attention", ROWS["native_sparse_attention"] | {"tokens": 16_384})
    assert len(taken) <= 1.1 * short


UNLIKE = '''
"""Run turns that are said to be alike, and are not."""
from dataclasses import replace

import torch

from harness import Strategy, alike, hookimpl


def on_torch(parts):
    inner = parts.update

    def update(parts, state, grads):
        pieces = []
        for turn in alike(range(1, 41), lambda turn: "the same"):
            BODY
        return inner(parts, state, grads)

    return replace(parts, update=update)


@hookimpl
def harness_strategies():
    return [Strategy("unlike", ("update",), {"torch": on_torch}, __doc__)]
'''
BODIES = {"keeps": "pieces.append(torch.zeros(1 << 20))", "grows": "piece = torch.zeros(turn << 20) + 1"}


@pytest.mark.parametrize("name", BODIES)
def test_turns_that_are_not_alike_are_all_taken(name, monkeypatch, tmp_path):
    path = tmp_path / "unlike.py"
    path.write_text(UNLIKE.replace("BODY", BODIES[name]))
    quick = predicted("unlike", SMALL, str(path))
    in_whole(monkeypatch)
    assert quick == predicted("unlike", SMALL, str(path))
    update = {phase.name: phase.peak_bytes for phase in quick.predicted_phases}["steady_step/update"]
    assert update > 40 << 22
