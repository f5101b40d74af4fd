"""What a machine does in a second, and what operators take on it: measured once, and read from then on."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Place
from harness.backends.torch_calls import text_of
from harness.machine import gpu, interference, throughput
from harness.machine.gpu import Gpu
from harness.records.roofline import Operations, Rates
from harness.worker import operators
from harness.worker import throughput as measuring

TORCH = Place("torch", "cpu")
ON_GPU = Place("torch", "cuda")
RATES = Rates(bandwidth=1e9, flops={"float32": 1e9})


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_dtype_has_a_rate(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(backend)
    monkeypatch.setattr(measuring, "SIDE", {"cpu": 32})
    monkeypatch.setattr(measuring, "LENGTH", {"cpu": 1 << 10})
    rates = measuring.measured(Place(backend, "cpu"))
    assert rates["flops"].keys() == set(measuring.DTYPES)
    assert min(rates["bandwidth"], *rates["flops"].values()) > 0


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("dtype", measuring.DTYPES)
def test_what_is_multiplied_is_random(backend: str, dtype: str) -> None:
    _, arrays = measuring.WAYS[backend](Place(backend, "cpu"), (16, 16), dtype, "product")
    values = [{float(value) for value in array.reshape(-1)} for array in arrays[:2]]
    assert all(len(each) > 100 for each in values) and values[0] != values[1]


@pytest.mark.usefixtures("quiet")
def test_rates_are_measured_once_and_anew_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(module: str, *words: str, env: dict[str, str]) -> dict[str, float]:
        asked.append((module, *words))
        return {"bandwidth": float(len(asked))}

    monkeypatch.setattr(throughput, "answer_of", answer)
    found = [throughput.of_place(TORCH, tmp_path, anew=anew) for anew in (False, False, True, False)]
    assert found == [{"bandwidth": rate} for rate in (1.0, 1.0, 2.0, 2.0)]
    assert asked == [("harness.worker.throughput", "torch", "cpu")] * 2


def test_what_cannot_be_measured_or_read_is_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def fails(*words: str, env: dict[str, str]) -> None:
        raise throughput.AnswerError("it ended")

    monkeypatch.setattr(throughput, "answer_of", fails)
    (tmp_path / f"rates-{throughput.facts.name()}.json").write_text("[]")
    assert throughput.of_place(TORCH, tmp_path) is None
    assert throughput.of_place(Place("torch", "cuda"), tmp_path) is None


@pytest.mark.usefixtures("quiet")
def test_figures_that_cannot_be_stored_are_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: {"bandwidth": 1.0})
    assert throughput.of_place(TORCH, tmp_path / "file" / "harness") == {"bandwidth": 1.0}
    monkeypatch.setattr(throughput, "_timed", lambda place, calls, seconds: dict.fromkeys(calls, 1.0))
    one = product(64)
    assert throughput.with_calls(RATES, TORCH, [one], tmp_path / "file" / "harness").calls == {one.call: 1.0}


@pytest.mark.usefixtures("quiet")
def test_a_disk_that_is_full_leaves_the_figures_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: {"bandwidth": 1.0})
    throughput.of_place(TORCH, tmp_path)
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    write = Path.write_text

    def fill(path: Path, text: str, **options: Any) -> None:
        write(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    assert throughput.of_place(TORCH, tmp_path, anew=True) == {"bandwidth": 1.0}
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == before


@pytest.mark.usefixtures("quiet")
def test_calls_are_not_timed_where_no_temporary_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(throughput.tempfile, "NamedTemporaryFile", full)
    assert throughput.with_calls(RATES, TORCH, [product(64)], tmp_path).calls == {}


def product(side: int) -> Operations:
    x = torch.empty(side, side)
    return Operations("float32", 2.0 * side**3, 12 * side**2, text_of(torch.ops.aten.mm.default, (x, x), {}))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "disturbances", lambda before, after: ())


@pytest.fixture
def timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time calls in this process: another one loads torch first."""

    def answer(module: str, device: str, calls: str, spent: str, env: dict[str, str]) -> dict[str, float | None]:
        assert module == "harness.worker.operators"
        return operators.timed(device, json.loads(Path(calls).read_text()), float(spent))

    monkeypatch.setattr(throughput, "answer_of", answer)


@pytest.mark.usefixtures("quiet")
def test_a_call_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = product(64), product(512)
    timed = throughput.with_calls(RATES, TORCH, [small, large], tmp_path).calls
    assert set(timed) == {small.call, large.call} and all(0 < seconds < 1 for seconds in timed.values())
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was timed again"))
    assert throughput.with_calls(RATES, TORCH, [large], tmp_path).calls == {large.call: timed[large.call]}
    assert throughput.with_calls(RATES, TORCH, [Operations("float32", 1e9, 10)], tmp_path).calls == {}


def test_calls_are_not_timed_where_others_run_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was timed for nothing"))
    monkeypatch.setattr(interference, "disturbances", lambda before, after: ("crowded",) if after == before else ())
    assert throughput.with_calls(RATES, TORCH, [product(64)], tmp_path).calls == {}


def test_a_step_whose_calls_are_too_long_is_not_worth_timing() -> None:
    short, long = product(64), product(64)._replace(flops=1e13)
    assert throughput.may_be_timed([short], 0.9, TORCH, RATES)
    assert throughput.may_be_timed([short._replace(flops=1e13, times=20_000), long], 0.5, TORCH, RATES), "ten times"
    assert not throughput.may_be_timed([short, long], 0.9, TORCH, RATES)
    assert not throughput.may_be_timed([Operations("float32", 1e9, 10)], 0.9, TORCH, RATES), "no call of its own"
    assert not throughput.may_be_timed([short._replace(dtype="float16")], 0.9, TORCH, RATES), "no rate"


@pytest.mark.usefixtures("quiet", "timed_here")
def test_what_cannot_be_made_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Operations("float32", 10.0, 10, json.dumps(["aten.nothing.default", [], {"options": {}}]))
    assert throughput.with_calls(RATES, TORCH, [wrong], tmp_path).calls == {}
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was tried again"))
    assert throughput.with_calls(RATES, TORCH, [wrong], tmp_path).calls == {}


@pytest.mark.usefixtures("quiet")
def test_a_call_that_takes_long_or_moves_much_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: pytest.fail("it was timed"))
    long, much = product(8)._replace(flops=1e13), product(8)._replace(moved=1 << 50)
    assert throughput.with_calls(RATES, TORCH, [long], tmp_path).calls == {}
    assert throughput.with_calls(RATES, TORCH, [much], tmp_path).calls == {}
    monkeypatch.setattr(throughput.facts, "total_bytes", lambda: 8 * product(8).moved - 1)
    assert throughput.with_calls(RATES, TORCH, [product(8)], tmp_path).calls == {}, "too much for this container"


@pytest.mark.usefixtures("quiet")
def test_a_call_on_a_gpu_may_move_a_part_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = product(64)
    monkeypatch.setattr(throughput, "answer_of", lambda *words, **options: {one.call: 1.0})
    enough, much = 8 * one.moved, 1 << 40
    for host, device, timed in ((much, enough - 1, False), (1, enough, True), (enough - 1, None, False)):
        monkeypatch.setattr(throughput.facts, "total_bytes", lambda host=host: host)
        monkeypatch.setattr(gpu, "usable_bytes", lambda device=device: device)
        calls = throughput.with_calls(RATES, ON_GPU, [one], tmp_path / str(device)).calls
        assert bool(calls) is timed, (host, device)


@pytest.mark.usefixtures("quiet")
def test_figures_of_a_gpu_are_those_of_one_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked = product(64), []

    def answer(module: str, *words: str, env: dict[str, str]) -> dict[str, float]:
        asked.append(module)
        return {one.call if module.endswith("operators") else "bandwidth": float(len(asked))}

    monkeypatch.setattr(throughput.backends, "absent", lambda *place: None)
    monkeypatch.setattr(throughput, "answer_of", answer)
    for card, figure in (("NVIDIA L4", 1.0), ("NVIDIA H200", 3.0), ("NVIDIA L4", 1.0)):
        monkeypatch.setattr(gpu, "detect", lambda card=card: Gpu(card, 1 << 40, 1 << 40, "580.1"))
        assert throughput.of_place(ON_GPU, tmp_path) == {"bandwidth": figure}
        assert throughput.with_calls(RATES, ON_GPU, [one], tmp_path).calls == {one.call: figure + 1}
    assert len(asked) == 4


@pytest.mark.usefixtures("quiet", "timed_here")
def test_timing_ends_in_time_and_the_next_prediction_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = [product(side) for side in (512, 8, 64)]
    monkeypatch.setattr(throughput, "SPENT_SECONDS", 1e-9)
    assert throughput.with_calls(RATES, TORCH, work, tmp_path).calls == {}
    assert throughput.with_calls(RATES, TORCH, work, tmp_path, 20.0).calls, "who names a time has it"
    monkeypatch.setattr(throughput, "SPENT_SECONDS", 20.0)
    assert set(throughput.with_calls(RATES, TORCH, work, tmp_path).calls) == {each.call for each in work}


@pytest.mark.usefixtures("timed_here")
def test_what_was_timed_beside_something_else_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "disturbances", lambda before, after: ("crowded",))
    assert throughput.with_calls(RATES, TORCH, [product(64)], tmp_path).calls == {}
    monkeypatch.setattr(throughput, "measured", lambda place: {"bandwidth": 1.0, "flops": {}})
    assert throughput.of_place(TORCH, tmp_path) == {"bandwidth": 1.0, "flops": {}}
    assert not list(tmp_path.iterdir())
