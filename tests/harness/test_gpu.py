"""Device memory, which has meters of its own: the allocator's counters, the driver's view, the caps."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from harness import Place
from harness.backends import DRIVER_FILES
from harness.machine import environment
from harness.records import Applied, Case, Task
from harness.run import runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(Path(file).exists() for file in DRIVER_FILES), reason="this machine has no NVIDIA GPU to measure on"
    ),
]

BLOCKS = Path(__file__).parent / "known_bytes" / "blocks.py"
MIB = 1 << 20
TORCH_ROUNDING = 512
BOUND = 300.0
SPIKE_MIB = 768
BUDGET_MIB = 512
SHAPE = {"layers": 2, "width": 256, "heads": 4, "vocabulary": 8192, "batch": 1, "tokens": 511}
LARGE = {**SHAPE, "vocabulary": 1 << 16, "tokens": 8191}
"""Logits of 2 GiB: far above the budget, far below the device."""

PLUGIN = f'''
"""One part takes device memory for a moment: {SPIKE_MIB} MiB, or twice what the device has."""

from dataclasses import replace
from harness import Strategy, hookimpl


def blocks(place, mib):
    """Make an array of so many MiB on the device, and wait for it."""
    if place.backend == "torch":
        import torch

        return torch.zeros((mib, 1 << 20), dtype=torch.uint8, device=place.device)
    import jax
    import jax.numpy as jnp

    return jax.block_until_ready(jnp.zeros((mib, 1 << 20), jnp.uint8))


def device_mib(place):
    if place.backend == "torch":
        import torch

        return torch.cuda.get_device_properties(0).total_memory >> 20
    import jax

    return jax.devices("gpu")[0].memory_stats()["bytes_limit"] >> 20


def in_part(part):
    def on_any(parts, mib: int = 0):
        inner = getattr(parts, part)

        def taking(parts, *args):
            if parts.shape.tokens % 2:  # the real shapes, not the one that primes
                block = blocks(parts.place, mib or 2 * device_mib(parts.place))
                del block
            return inner(parts, *args)

        return replace(parts, **{{part: taking}})

    return Strategy(f"take_in_{{part}}", rewrites=(part,), on={{"torch": on_any, "jax": on_any}}, about="Take.")


@hookimpl
def harness_strategies():
    return [in_part(part) for part in ("source", "update")]
'''

numbers = count()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "taking.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture(scope="module", params=["torch/cuda", "jax/cuda"])
def place(request):
    return request.param


@pytest.fixture(scope="module")
def measured(plugin, place):
    """Run one worker on the device and give back its record; skip where the framework sees no device."""

    def once(*strategies, kind="memory", budget=None, shape=SHAPE, **settings):
        case = Case(
            workload="decoder",
            shape=shape,
            place=place,
            corpus="drawn",
            tokenizer="none",
            strategies=strategies,
            budget_bytes=budget,
        )
        run_id = f"gpu-{os.getpid()}-{next(numbers)}"
        common = {"run_id": run_id, "parent": os.getpid(), "folder": "", "plugins": (str(plugin),)}
        (record,) = runner.run(Task(kind=kind, cases=(case,), **common, **settings), 1, BOUND)
        if record.status == "unsupported":
            pytest.skip(record.evidence["message"])
        return record

    return once


@pytest.fixture(scope="module")
def twice(measured):
    """The same case in two memory workers."""
    records = [measured(), measured()]
    assert [record.status for record in records] == ["ok", "ok"], [record.evidence for record in records]
    return records


# One array in an idle process


def on_device(backend):
    env = environment.variables("memory", Place(backend, "cuda"), "known-bytes", 1, None)
    command = [sys.executable, str(BLOCKS), "on_device", backend]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    if "Unavailable" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return {int(size): peaks for size, peaks in json.loads(done.stdout).items()}


def test_torch_counts_a_tensor_rounded_up_to_512_bytes():
    found = on_device("torch")
    assert len(found) == 7
    for size, peaks in found.items():
        assert peaks["allocated"] == -(-size // TORCH_ROUNDING) * TORCH_ROUNDING, size
        assert peaks["requested"] == size
        assert peaks["reserved"] >= peaks["allocated"]
        assert peaks["retries"] == 0


def test_jax_counts_an_array_at_least_in_full():
    found = on_device("jax")
    highest = 0
    for size, peaks in found.items():  # growing, since the counter has no reset
        if size <= 513:  # what takes no more than was there before leaves no figure
            assert peaks.get("allocated", size) >= size
            continue
        assert peaks["allocated"] >= size
        assert peaks["allocated"] >= highest
        highest = peaks["allocated"]
    assert max(found) <= highest <= 2 * max(found) + MIB


# One case in workers


def test_two_memory_workers_of_one_case_agree_to_the_byte(twice):
    first, second = twice
    assert first.memory.peak_device_bytes > 0
    assert first.memory.peak_device_bytes == second.memory.peak_device_bytes
    assert first.memory.requested_device_bytes == second.memory.requested_device_bytes
    assert first.memory.peak_phase == second.memory.peak_phase
    assert len(first.memory.losses) == len(second.memory.losses) == 3


@pytest.mark.parametrize("part", ["source", "update"])
def test_a_temporary_freed_within_one_part_is_in_the_peak_which_names_its_phase(measured, place, twice, part):
    if place == "jax/cuda" and part == "update":
        pytest.skip("a compiled step is one phase, and the compiler may leave out what is not used")
    record = measured(Applied(name=f"take_in_{part}", knobs={"mib": SPIKE_MIB}))
    assert record.status == "ok", record.evidence
    assert twice[0].memory.peak_device_bytes < SPIKE_MIB * MIB <= record.memory.peak_device_bytes
    if part == "source":
        assert record.memory.peak_phase == "source"
        assert record.memory.peak_device_bytes < SPIKE_MIB * MIB + twice[0].memory.peak_device_bytes
    else:
        assert record.memory.peak_phase.endswith("step/update")


def test_the_driver_sees_at_least_what_is_reserved_beside_the_context(measured, place):
    record = measured()
    if record.memory.driver_device_bytes is None:  # as in a container that hides processes, and under MIG
        reason = record.missing["driver_device_bytes"]
        assert reason
        pytest.skip(reason)
    assert record.memory.context_device_bytes is not None
    held = record.memory.reserved_device_bytes or record.memory.peak_device_bytes  # JAX does not tell what it reserved
    assert record.memory.driver_device_bytes >= held + record.memory.context_device_bytes - 2 * MIB


def test_a_need_above_the_budget_is_the_budgets_and_later_cases_are_unaffected(measured, twice):
    record = measured(shape=LARGE, budget=BUDGET_MIB * MIB)
    assert record.status == "oom_budget", record.evidence
    assert int(record.evidence["limit_bytes"]) == BUDGET_MIB * MIB
    assert record.evidence["phase"].startswith(("compile", "first_step"))  # tuning a kernel takes its output too
    assert_unaffected(measured, twice)


def test_a_need_beyond_the_device_is_the_devices_and_later_cases_are_unaffected(measured, twice):
    record = measured(Applied(name="take_in_source"))
    assert record.status == "oom_device", record.evidence
    assert record.evidence["phase"] == "source"
    assert "limit_bytes" not in record.evidence
    assert_unaffected(measured, twice)


def assert_unaffected(measured, twice):
    after = measured()
    assert after.status == "ok", after.evidence
    assert after.memory.peak_device_bytes == twice[0].memory.peak_device_bytes


def test_a_budget_above_the_need_changes_no_figure(measured, twice):
    record = measured(budget=twice[0].memory.peak_device_bytes + 2048 * MIB)
    assert record.status == "ok", record.evidence
    assert record.memory.within_budget is True
    assert record.memory.peak_device_bytes == twice[0].memory.peak_device_bytes


def test_the_peak_is_at_least_what_the_compilers_analysis_adds_up(measured, place, twice):
    if place != "jax/cuda":
        pytest.skip("only a compiled step has an analysis")
    predicted = measured(kind="predict")
    assert predicted.prediction.predicted_peak_bytes is not None, predicted.missing
    assert twice[0].memory.peak_device_bytes >= 0.99 * predicted.prediction.predicted_peak_bytes


def test_steps_timed_on_the_device_account_for_the_wall_time(measured):
    record = measured(kind="time", steps=20, warmup=5)
    assert record.status == "ok", record.evidence
    assert len(record.times.step_seconds) == 20
    assert min(record.times.step_seconds) > 0
