"""What operators take on this machine: timed once, stored, and only while nothing else runs."""

import json
from pathlib import Path

import pytest
import torch

from harness.backends.torch_calls import text_of
from harness.contract.place import Place
from harness.machine import interference, throughput
from harness.records.roofline import Operations, Rates

PLACE = Place("torch", "cpu")
RATES = Rates(bandwidth=1e9, flops={"float32": 1e9})


def product(side: int) -> Operations:
    x = torch.empty(side, side)
    return Operations("float32", 2.0 * side**3, 12 * side**2, text_of(torch.ops.aten.mm.default, (x, x), {}))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "disturbances", lambda before, after: ())


@pytest.mark.usefixtures("quiet")
def test_a_call_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = product(64), product(512)
    timed = throughput.with_calls(RATES, PLACE, [small, large], tmp_path).calls
    assert set(timed) == {small.call, large.call} and all(0 < seconds < 1 for seconds in timed.values())
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was timed again"))
    assert throughput.with_calls(RATES, PLACE, [large], tmp_path).calls == {large.call: timed[large.call]}
    assert throughput.with_calls(RATES, PLACE, [Operations("float32", 1e9, 10)], tmp_path).calls == {}


@pytest.mark.usefixtures("quiet")
def test_what_cannot_be_made_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Operations("float32", 10.0, 10, json.dumps(["aten.nothing.default", [], {"options": {}}]))
    assert throughput.with_calls(RATES, PLACE, [wrong], tmp_path).calls == {}
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was tried again"))
    assert throughput.with_calls(RATES, PLACE, [wrong], tmp_path).calls == {}


@pytest.mark.usefixtures("quiet")
def test_a_call_that_takes_long_or_moves_much_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was timed"))
    long, much = product(8)._replace(flops=1e13), product(8)._replace(moved=1 << 50)
    assert throughput.with_calls(RATES, PLACE, [long], tmp_path).calls == {}
    assert throughput.with_calls(RATES, PLACE, [much], tmp_path).calls == {}


def test_what_was_timed_beside_something_else_is_neither_used_nor_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "disturbances", lambda before, after: ("crowded",))
    assert throughput.with_calls(RATES, PLACE, [product(64)], tmp_path).calls == {}
    assert not list(tmp_path.iterdir())
