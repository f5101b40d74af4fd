"""What a machine does in a second is measured once, and read from then on."""

from pathlib import Path

import pytest

from harness import Place
from harness.machine import throughput
from harness.worker import throughput as measuring

TORCH = Place("torch", "cpu")


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_dtype_has_a_rate(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(backend)
    monkeypatch.setattr(measuring, "SIDE", {"cpu": 32})
    monkeypatch.setattr(measuring, "LENGTH", {"cpu": 1 << 10})
    rates = measuring.measured(Place(backend, "cpu"))
    assert rates["flops"].keys() == set(measuring.DTYPES)
    assert min(rates["bandwidth"], *rates["flops"].values()) > 0


def test_rates_are_measured_once_and_anew_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    asked = []

    def answer(module: str, *words: str, env: dict[str, str]) -> dict[str, float]:
        asked.append((module, *words))
        return {"bandwidth": float(len(asked))}

    monkeypatch.setattr(throughput, "answer_of", answer)
    found = [throughput.of_place(TORCH, tmp_path, anew=anew) for anew in (False, False, True, False)]
    assert found == [{"bandwidth": rate} for rate in (1.0, 1.0, 2.0, 2.0)]
    assert asked == [("harness.worker.throughput", "torch", "cpu")] * 2


def test_what_cannot_be_measured_or_read_is_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def fails(*words: str, env: dict[str, str]) -> None:
        raise throughput.AnswerError("it ended")

    monkeypatch.setattr(throughput, "answer_of", fails)
    (tmp_path / f"rates-{throughput.facts.name()}.json").write_text("[]")
    assert throughput.of_place(TORCH, tmp_path) is None
    assert throughput.of_place(Place("torch", "cuda"), tmp_path) is None
