"""A prediction that leaves out what repeats says the same as one that runs all of it, and asks torch for far less."""

from contextlib import nullcontext
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends import torch_memory, torch_operators
from harness.backends.torch_turns import Turns
from harness.contract import plugins
from harness.records import Applied, Case, Prediction, Task
from harness.records.forecast import Forecast
from harness.records.roofline import by_intensity
from harness.worker import prediction, tasks

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


def predicted(
    name: str, shape: dict, path: str | None = None, place: str = "torch/cpu", knobs: dict[str, Any] | None = None
) -> Prediction:
    """Predict one row in this process; `name` are its strategies, joined by " + "."""
    names = () if path is None else (path,)
    loaded = plugins.load(names)
    case = Case(
        workload="decoder",
        shape=loaded.workloads["decoder"].shape(**shape).model_dump(),
        place=place,
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=each, knobs=(knobs or {}).get(each, {})) for each in name.split(" + ")),
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
    """The operators that torch was asked for, without those that a process asks once."""
    predicted("fused_loss", SMALL)
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


@pytest.fixture
def forecasts(monkeypatch: pytest.MonkeyPatch) -> list[Forecast]:
    """All that predictions showed, what stood at their peaks included."""
    seen: list[Forecast] = []
    inner = prediction._figures

    def figures(*args: Any) -> Any:
        seen.append(args[-1]._replace(work=by_intensity(args[-1].work)))
        return inner(*args)

    monkeypatch.setattr(prediction, "_figures", figures)
    return seen


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each loop whether its first turn alone was taken."""
    seen: list[bool] = []
    inner = Turns.repeat

    def repeat(self: Turns, loop: Any) -> bool:
        seen.append(inner(self, loop))
        return seen[-1]

    monkeypatch.setattr(Turns, "repeat", repeat)
    return seen


LAYERS = SMALL | {"layers": 3, "tokens": 320}
PIECES = SMALL | {"layers": 1, "batch": 6, "vocabulary": 8192}
SPARSE = "native_sparse_attention"
KNOBS = {
    SPARSE: {"window": 64, "blocks": 2},
    "accumulate": {"pieces": 3},
    "chunked_backward_loss": {"chunk": 300},
    "fused_loss": {"chunk": 300},
}
LOOPS = {
    SPARSE: (LAYERS, 6),
    f"{SPARSE} + checkpoint": (LAYERS, 9),
    f"{SPARSE} + checkpoint + bfloat16": (LAYERS, 9),
    "chunked_backward_loss + accumulate": (PIECES, 3),
    "fused_loss + accumulate": (PIECES, 3),
    "cut_loss + accumulate": (PIECES, 3),
}
"""Rows that run a loop several times: their shape, and the loops of a step, of which most are repeated."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("place", ["torch/cpu", "torch/cuda"])
@pytest.mark.parametrize("names", LOOPS)
def test_a_loop_that_comes_again_is_predicted_as_if_all_its_turns_were_taken(
    names, place, forecasts, repeated, monkeypatch
):
    shape, loops = LOOPS[names]
    quick = predicted(names, shape, place=place, knobs=KNOBS)
    assert sum(repeated) >= loops, repeated
    monkeypatch.setattr(torch_memory, "recorded", lambda recorder: nullcontext())
    assert quick == predicted(names, shape, place=place, knobs=KNOBS)
    assert forecasts[0] == forecasts[1]


THRICE = UNLIKE.replace(
    """        for turn in alike(range(1, 41), lambda turn: "the same"):
            BODY
""",
    """        for layer in range(3):
            for turn in alike(range(1, 5), lambda turn: max(2, SIZE)):
                BODY
""",
)
FREED = "piece = torch.zeros(SIZE << 20) + 1; del piece"
MEMORIES = "; ".join(
    (
        "there = torch.zeros(turn << 20, device=parts.place.device)",
        "locked = torch.zeros(turn << 18, pin_memory=parts.place.device == 'cuda')",
        "here = torch.zeros(turn << 19, device='cpu') + 1",
        "there = there + 1",
        "del there, locked, here",
    )
)
OPERATORS = "piece = torch.zeros(turn << 20) + 1; piece = piece.exp() if layer == 2 else piece.sin(); del piece"
GROUPS = "; ".join(
    (
        "rows = torch.zeros(64 * turn, 64, dtype=torch.bfloat16)",
        "torch._grouped_mm(rows, rows.new_zeros(4, 64, 64), offs=torch.zeros(4, dtype=torch.int32))",
        "del rows",
    )
)
SCRATCH = "; ".join(
    (
        "pieces += [torch.zeros(1 << 22, device=parts.place.device)] if turn == 1 else []",
        "scores = torch.zeros(turn << 18, device=parts.place.device)",
        "torch.ops.aten._softmax_backward_data(scores, scores, 0, scores.dtype)",
        "del scores",
    )
)
GRAPH = "exec('with torch.enable_grad(): (torch.ones(turn, requires_grad=True) * 2).sin()')"
AGAIN = {
    "the same": (FREED, "turn", 4),
    "in all memories": (MEMORIES, "turn", 4),
    "other sizes in the last layer": (FREED, "(turn + (layer == 2))", 2),
    "another size at the end of the last layer": (FREED, "(turn + (layer == 2) * (turn == 4))", 2),
    "other operators in the last layer": (OPERATORS, "turn", 2),
    "kept from turn to turn": ("piece = torch.zeros(turn << 20) + 1", "turn", 0),
    "kept": ("pieces.append(torch.zeros(turn << 20))", "turn", 0),
    "kept by the first": ("pieces += [torch.zeros(1 << 20)] if turn == 1 else []", "turn", 4),
    "given back by the last": ("pieces[:] = [torch.zeros(1 << 20)] if turn < 4 else []", "turn", 0),
    "scratch of a kernel": (SCRATCH, "turn", 4),
    "groups": (GROUPS, "turn", {"torch/cpu": 0, "torch/cuda": 4}),
    "a graph": (GRAPH, "turn", {"torch/cpu": 0, "torch/cuda": 4}),
}
"""What a turn does and its size, and how many are repeated of three loops in each of two steps.

A library of the CPU keeps kernels for groups, and a graph counts there.
"""
ON_GPUS = ("the same", "in all memories", "scratch of a kernel", "groups", "a graph")
"""What a GPU has a part in: how turns are compared is the same for both."""


@pytest.mark.parametrize(
    ("name", "place"), [*((name, "torch/cpu") for name in AGAIN), *((name, "torch/cuda") for name in ON_GPUS)]
)
def test_a_loop_is_repeated_where_it_does_what_it_did(name, place, forecasts, repeated, monkeypatch, tmp_path):
    body, size, times = AGAIN[name]
    path = tmp_path / "unlike.py"
    path.write_text(THRICE.replace("BODY", body).replace("SIZE", size))
    quick = predicted("unlike", SMALL, str(path), place)
    assert sum(repeated) == (times if isinstance(times, int) else times[place]), repeated
    monkeypatch.setattr(torch_memory, "recorded", lambda recorder: nullcontext())
    assert quick == predicted("unlike", SMALL, str(path), place)
    assert forecasts[0] == forecasts[1]
