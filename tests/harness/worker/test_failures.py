"""How an error that ends a task is named: its kind, what it says, and the line in the code of a plugin."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import knobs
from harness.contract.place import Place
from harness.records import Case, Task
from harness.run import runner
from harness.worker.failures import failure, first_line

HERE = Path(__file__).name
TORCH = Place("torch", "cpu")


def within(numbers: list[int]) -> int:
    return numbers[7]


def deep() -> None:
    within([])


def in_torch() -> None:
    import torch

    torch.nn.Linear(2, 3)(torch.zeros(5))


def as_sentence() -> None:
    raise ValueError("choose another kind")


def refused_by_ours() -> None:
    knobs.above_0("checkpoint", every=0)


def line_of(function: Callable[..., Any]) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + 1}"


def ended(function: Callable[[], Any]) -> tuple[str, dict[str, Any]]:
    with pytest.raises(Exception) as caught:
        function()
    return failure(caught.value, TORCH)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (deep, line_of(within)),
        (in_torch, f"{HERE}:{in_torch.__code__.co_firstlineno + 3}"),
        (as_sentence, line_of(as_sentence)),
    ],
)
def test_an_error_has_its_line_in_the_code_of_a_plugin(function: Callable[[], Any], line: str) -> None:
    status, evidence = ended(function)
    assert (status, evidence["line"]) == ("error", line)


def test_a_refusal_of_a_knob_says_what_to_do_and_needs_no_line() -> None:
    status, evidence = ended(refused_by_ours)
    assert status == "error"
    assert "line" not in evidence


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("both have to be of one type:\n\n  one is float32\nmore", "both have to be of one type: one is float32"),
        ("it differs:", "it differs:"),
        ("one\ntwo", "one"),
        ("", ""),
    ],
)
def test_a_message_is_shortened_to_its_first_line_and_what_that_announces(said: str, line: str) -> None:
    assert first_line(said) == line


def test_memory_that_runs_out_in_a_worker_of_a_data_loader_is_that_of_the_host() -> None:
    """Torch raises its error anew, as one of the same kind if that takes a text alone, or else as a RuntimeError."""
    import numpy as np
    from torch._utils import ExceptionWrapper

    def in_a_worker() -> None:
        try:
            np.zeros(1 << 50, np.uint8)
        except MemoryError:
            wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
        wrapped.reraise()

    assert ended(in_a_worker)[0] == "oom_host"


def test_a_loss_over_a_batch_whose_targets_are_all_ignored_says_so() -> None:
    shape = {"layers": 1, "width": 16, "heads": 1, "vocabulary": 17, "batch": 1, "tokens": 3, "ignored": 0.99}
    case = Case(workload="decoder", shape=shape, place=TORCH, corpus="drawn", tokenizer="none")
    (record,) = runner.run(Task(kind="memory", cases=(case,), run_id="ignored", parent=0, folder="", steps=2), 1, 60.0)
    assert record.status == "invalid_output"
    assert "nan; of a batch whose targets are all ignored there is none" in record.evidence["message"]
