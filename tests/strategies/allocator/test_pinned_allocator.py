"""The variables reach the process that is timed, and its peak becomes that of what is alive."""

import os
from pathlib import Path

import pytest

from harness import plugins
from harness.machine.environment import PINS
from harness.records import Applied, Case, store
from harness.run import bench, session
from harness.suite import reader

SUITE = """
title: A time worker with freed blocks
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {layers: 2, width: 128, heads: 2, vocabulary: 4096, batch: 1, tokens: 512}
strategies: [pinned_allocator]
rounds: 1
steps: 2
warmup: 0
"""


def test_the_variables_are_those_of_the_memory_workers() -> None:
    strategy = plugins.load().strategies["pinned_allocator"]
    assert strategy.environment == {name: PINS[name] for name in PINS if name.startswith("MALLOC_")}
    assert not set(strategy.environment) & set(os.environ)


@pytest.mark.long
@pytest.mark.alone  # beside others, a worker that waits for a core may find that its clock was read too early
def test_the_timed_process_has_them(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "small.yaml").write_text(SUITE)
    loaded = plugins.load()
    plan = reader.read(tmp_path / "small.yaml", loaded)
    options = bench.Options(tmp_path / "results", cache=cache / "harness")
    records, _ = store.read(session.run(plan, loaded, options, bench.Progress()))
    times = {r.case.label: r.times for r in records if r.case and r.slot and r.slot.kind == "time" and r.status == "ok"}
    memory = {r.case.label: r.memory for r in records if r.case and r.slot and r.slot.kind == "memory"}
    pinned, stock = (times[name].native_peak_host_bytes for name in ("pinned_allocator", "baseline"))
    assert pinned < stock
    assert abs(pinned - memory["baseline"].peak_host_bytes) < 0.25 * memory["baseline"].peak_host_bytes
    assert times["baseline"].regime == "native"


def test_a_gpu_has_another_allocator() -> None:
    loaded = plugins.load()
    case = Case(
        workload="decoder", shape={}, place="torch/cuda", corpus="drawn", tokenizer="none",
        strategies=(Applied(name="pinned_allocator"),),
    )  # fmt: skip
    reason = loaded.strategies["pinned_allocator"].obstacle(case.place, loaded.workloads["decoder"])
    assert reason is not None and "allocator of its own" in reason
