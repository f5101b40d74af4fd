"""A memory worker on a GPU, whose counters are made up: JAX computes on the CPU here whatever the place is called."""

import jax
import pytest

from harness import Place
from harness.backends import jax as backend
from harness.backends import nvml
from harness.contract import plugins
from harness.machine import memory as host
from harness.records import Case, Task
from harness.worker import memory, numerics

MIB = 1 << 20
SHAPE = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 128, "tokens": 33}
LOADED = plugins.load()
FULL = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.")


@pytest.fixture
def counters(monkeypatch):
    """The counters of the device's allocator; what a step takes is added when it runs."""
    counters = {"bytes_in_use": MIB, "peak_bytes_in_use": 4 * MIB, "bytes_limit": 512 * MIB, "pool_bytes": 6 * MIB}
    monkeypatch.setattr(backend, "_stats", lambda place: [counters])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return counters


def measured(folder, budget=None):
    case = Case(
        workload="decoder", shape=SHAPE, place="jax/cuda", corpus="drawn", tokenizer="none", budget_bytes=budget
    )
    task = Task(kind="memory", cases=(case,), run_id="run", parent=0, folder=str(folder))
    return memory.measure(task, LOADED, backend)


def raising(monkeypatch, counters, peak):
    """Let the counter rise to a peak when a run waits for its first step."""
    inner = backend.wait

    def wait(outputs):
        counters["peak_bytes_in_use"] = max(peak, counters["peak_bytes_in_use"])
        inner(outputs)

    monkeypatch.setattr(backend, "wait", wait)


def test_what_compiling_took_is_said_to_hide_the_peak(counters, tmp_path):
    record = measured(tmp_path)
    assert record.status == "ok", record.evidence
    assert record.memory.peak_device_bytes is None and record.memory.peak_phase is None
    assert "priming and compiling took more" in record.missing["peak_device_bytes"]


def test_a_run_that_took_more_than_compiling_has_a_peak(counters, tmp_path, monkeypatch):
    counters["peak_bytes_in_use"] = 0
    prime = memory.prime

    def primed(*rest):
        prime(*rest)
        raising(monkeypatch, counters, 9 * MIB)

    monkeypatch.setattr(memory, "prime", primed)
    record = measured(tmp_path, budget=512 * MIB)
    assert record.memory.peak_device_bytes == 8 * MIB
    assert record.memory.peak_phase and record.memory.within_budget
    assert record.evidence["limit_bytes"] == 512 * MIB


@pytest.mark.parametrize(("budget", "status"), [(512 * MIB, "oom_budget"), (None, "oom_device")])
def test_compiling_under_a_budget_is_within_its_bound(counters, tmp_path, monkeypatch, budget, status):
    prepare = backend.prepare

    def refused(parts, batch=None, abstract=None):
        if batch is not None:
            raise FULL
        return prepare(parts, batch, abstract)

    monkeypatch.setattr(backend, "prepare", refused)
    record = measured(tmp_path, budget)
    assert (record.status, record.evidence["phase"]) == (status, "compile")
    assert record.evidence["request_bytes"] == 2048 * MIB


def test_priming_that_does_not_fit_is_that_of_the_budget_too(counters, tmp_path, monkeypatch):
    def refused(*rest):
        raise FULL

    monkeypatch.setattr(memory, "prime", refused)
    record = measured(tmp_path, 512 * MIB)
    assert (record.status, record.evidence["phase"]) == ("oom_budget", "prime")


def test_the_context_is_what_the_driver_counts_beside_the_allocator(counters, tmp_path, monkeypatch):
    class View(nvml.View):
        def used(self):
            return 500 * MIB

    monkeypatch.setattr(nvml, "opened", lambda device, index: View())
    record = measured(tmp_path)
    assert record.memory.context_device_bytes == 494 * MIB
    assert "context_device_bytes" not in record.missing


def test_a_sandbox_that_resets_no_mark_leaves_the_figures_of_the_device(counters, tmp_path, monkeypatch):
    def absent():
        raise FileNotFoundError("/proc/self/clear_refs")

    monkeypatch.setattr(host, "reset_peak", absent)
    monkeypatch.setattr(host, "mark_is_low", lambda: False)
    counters["peak_bytes_in_use"] = 0
    raising(monkeypatch, counters, 9 * MIB)
    prime = memory.prime
    monkeypatch.setattr(memory, "prime", lambda *rest: (prime(*rest), counters.update(peak_bytes_in_use=0)))
    record = measured(tmp_path)
    assert record.status == "ok" and "no_reset" in record.flags
    assert record.memory.peak_device_bytes == 8 * MIB
    assert record.memory.peak_host_bytes is None and not record.memory.phases
    assert record.missing["peak_host_bytes"] == "the kernel keeps the mark"


# Answers


class Asked:
    """A backend that remembers how strictly it was asked for the same bits."""

    def __init__(self):
        self.strict = []

    def deterministic(self, place, strict=True):
        self.strict.append(strict)


def test_what_has_no_deterministic_form_is_compared_all_the_same_and_said(monkeypatch):
    asked = Asked()

    def once(task, loaded, backend):
        if backend.strict == [True]:
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set ...\nmore")
        return memory.Record()

    monkeypatch.setattr(numerics, "_measured", once)
    case = Case(workload="decoder", shape=SHAPE, place=Place("torch", "cuda"), corpus="drawn", tokenizer="none")
    record = numerics.measure(Task(kind="numerics", cases=(case,), run_id="", parent=0, folder=""), LOADED, asked)
    assert asked.strict == [True, False]
    assert "equal bits are by chance: cumsum_cuda_kernel" in record.notes["determinism"]


def test_another_error_is_not_taken_for_that(monkeypatch):
    def fails(*rest):
        raise RuntimeError("the sizes do not match")

    monkeypatch.setattr(numerics, "_measured", fails)
    case = Case(workload="decoder", shape=SHAPE, place=Place("torch", "cuda"), corpus="drawn", tokenizer="none")
    with pytest.raises(RuntimeError, match="sizes"):
        numerics.measure(Task(kind="numerics", cases=(case,), run_id="", parent=0, folder=""), LOADED, Asked())
