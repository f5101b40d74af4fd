"""What the backends make of a GPU's counters, budgets and errors, without one."""

import types

import jax
import pytest
import torch

from harness import Place
from harness.backends import Unavailable
from harness.backends import jax as on_jax
from harness.backends import torch as on_torch
from harness.worker.failures import failure, request_bytes

TORCH, JAX = Place("torch", "cuda"), Place("jax", "cuda")
GIB, MIB = 1 << 30, 1 << 20
REFUSED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 512.00 MiB is "
    "free. 512.00 MiB allowed; Of the allocated memory 200 MiB is allocated by PyTorch"
)


@pytest.fixture
def card(monkeypatch):
    """A card of 79 GiB with half a GiB taken by the context, and counters of torch's allocator that a test sets."""
    card = types.SimpleNamespace(total=79 * GIB, free=78.5 * GIB, fractions=[], stats={}, pinned={})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(card.free), card.total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", card.fractions.append)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: card.stats)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: card.pinned)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "reset_peak_host_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(on_torch, "_base", {})
    return card


def counters(allocated, reserved, requested=0, retries=0):
    both = {"allocated_bytes.all": allocated, "reserved_bytes.all": reserved, "requested_bytes.all": requested}
    figures = {f"{name}.{which}": size for name, size in both.items() for which in ("current", "peak")}
    return figures | {"num_alloc_retries": retries}


@pytest.fixture
def allocator(monkeypatch):
    """The counters of JAX's allocator on one device."""
    stats = {"bytes_in_use": 100, "peak_bytes_in_use": 5000, "bytes_limit": 40 * GIB}
    monkeypatch.setattr(on_jax, "_stats", lambda place: [stats])
    monkeypatch.setattr(on_jax, "_base", {})
    monkeypatch.setattr(on_jax, "_before", {})
    return stats


# Budgets


def test_a_budget_that_the_card_can_give_bounds_torch_above_what_is_live(card):
    card.stats = counters(2 * GIB, 3 * GIB)
    on_torch.clear(TORCH)
    assert on_torch.cap(TORCH, 40 * GIB) == 40 * GIB
    assert card.fractions == [42 / 79]


@pytest.mark.parametrize("budget", [128 * GIB, 79 * GIB])
def test_a_budget_that_the_card_cannot_give_is_no_bound_and_the_device_refuses(card, budget):
    limit = on_torch.cap(TORCH, budget)
    assert limit is None and not card.fractions
    status, evidence = failure(torch.OutOfMemoryError(REFUSED), TORCH, limit)
    assert (status, evidence["request_bytes"]) == ("oom_device", 2 * GIB)
    assert "limit_bytes" not in evidence


@pytest.mark.parametrize(
    ("limit", "bound"), [(40 * GIB, 40 * GIB), (40 * GIB - 9 * MIB, 40 * GIB), (36 * GIB, None), (75 * GIB, None)]
)
def test_a_budget_binds_jax_where_it_is_the_limit_of_its_allocator(allocator, limit, bound):
    allocator["bytes_limit"] = limit
    assert on_jax.cap(JAX, 40 * GIB) == bound
    assert on_jax.cap(JAX, None) is None


# Peaks


def test_segments_and_page_locked_memory_count_above_the_same_base_as_blocks(card):
    card.stats, card.pinned = counters(100, 2 * MIB, 90), {"allocated_bytes.current": 4096}
    on_torch.clear(TORCH)
    card.stats = counters(6 * MIB + 100, 8 * MIB, 5 * MIB + 90, retries=1)
    card.pinned = {"allocated_bytes.peak": 4096 + (1 << 20)}
    assert on_torch.peak(TORCH) == {
        "allocated": 6 * MIB,
        "requested": 5 * MIB,
        "reserved": 8 * MIB - 100,
        "retries": 1,
        "pinned": 1 << 20,
    }


def test_what_compiling_took_in_jax_is_no_peak_of_the_run(allocator):
    on_jax.clear(JAX)
    allocator["bytes_in_use"] = 900
    assert on_jax.peak(JAX) == {} and on_jax.peaks(JAX) == []
    allocator["peak_bytes_in_use"] = 6000
    assert on_jax.peak(JAX) == {"allocated": 5900}


# Memory that ran out, by other names


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
        "Last error:\nCuda failure 2 'out of memory'",
        REFUSED,
    ],
)
def test_libraries_on_the_device_run_out_of_its_memory(text):
    assert on_torch.ran_out(RuntimeError(text)) == "device"
    assert on_torch.ran_out(RuntimeError("CUDA error: an illegal memory access was encountered")) is None


@pytest.mark.parametrize("text", ["std::bad_alloc", "[enforce fail] DefaultCPUAllocator: not enough memory: you tried"])
def test_libraries_of_the_cpu_run_out_of_the_memory_of_the_host(text):
    assert on_torch.ran_out(RuntimeError(text)) == "host"


@pytest.mark.parametrize(("where", "status"), [(TORCH, "oom_host"), (Place("torch", "cpu"), "oom_budget")])
def test_a_budget_of_the_device_bounds_nothing_of_the_host(where, status):
    assert failure(MemoryError(), where, limit=GIB, data_bytes=GIB - MIB)[0] == status


def test_page_locked_memory_is_that_of_the_host(card):
    error = RuntimeError("CUDA error: out of memory")
    assert on_torch.ran_out(error) == "host"
    card.free = 4 * MIB
    assert on_torch.ran_out(error) == "device"


def test_jax_tells_the_memory_of_a_kernel_the_host_and_the_device_apart(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kernel = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 264192, available: 232448"
    host = "RESOURCE_EXHAUSTED: Failed to allocate 100 bytes in pinned_host"
    device = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB."
    assert [on_jax.ran_out(RuntimeError(text)) for text in (kernel, host, device)] == [None, "host", "device"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("Tried to allocate 2.00 GiB.", 2 * GIB),
        ("trying to allocate 2.00GiB.", 2 * GIB),
        ("trying to allocate 2147483648 bytes.", 2 * GIB),
        ("Tried to allocate 20.00 MiB", 20 * MIB),
        ("CUBLAS_STATUS_ALLOC_FAILED", None),
    ],
)
def test_what_was_asked_for_is_read_in_every_unit(text, size):
    assert request_bytes(text) == size


# What stands in the way of a device


def test_a_build_for_the_cpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Unavailable, match="a build for the CPU"):
        on_torch.start(TORCH)


def test_a_driver_that_is_too_old_speaks_for_itself(monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(
        Unavailable, match=r"no GPU that it can use: The NVIDIA driver .* too old \(found version 11040"
    ):
        on_torch.start(TORCH)


def test_jax_without_a_device_says_why(monkeypatch):
    def devices(platform):
        raise RuntimeError(f"Unknown backend: '{platform}' requested, but no platforms that are instances of it\nmore")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(Unavailable, match="no cuda device that it can use: Unknown backend: 'gpu'"):
        on_jax.start(JAX)


def test_float32_is_float32_on_a_gpu_in_both(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda platform: [types.SimpleNamespace(device_kind="a GPU")])
    before = jax.config.jax_default_matmul_precision
    try:
        on_jax.start(JAX)
        assert jax.config.jax_default_matmul_precision == "highest"
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    on_torch.start(Place("torch", "cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


def test_torch_is_asked_for_the_same_bits_on_a_gpu_alone_and_warns_where_it_need_not_be_strict(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, warn_only: asked.append((mode, warn_only)))
    on_torch.deterministic(Place("torch", "cpu"))
    assert asked == []
    on_torch.deterministic(TORCH)
    on_torch.deterministic(TORCH, strict=False)
    assert asked == [(True, False), (True, True)]
