"""A mixture of experts in bfloat16 grows with each step, and no more than by few kernels where few are kept."""

import os
import subprocess
import sys

import pytest
import torch

from harness import Parts, Place, plugins
from harness.backends import torch_kernels
from harness.backends.torch import predict
from harness.backends.torch_kernels import CAPACITY, KERNEL, NATIVE, VARIABLE
from harness.machine.environment import PINS
from harness.records import Applied, Case

STRATEGY = plugins.load().strategies["small_kernel_cache"]
GROWTH = """
import re
from pathlib import Path
import torch

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

x, matrix = torch.ones(400, 32, dtype=torch.bfloat16), torch.ones(32, 32, dtype=torch.bfloat16)
x[:1] @ matrix
before = resident()
for rows in range(2, 302):
    x[:rows] @ matrix
print(resident() - before)
"""


def grown(variables: dict[str, str]) -> int:
    """Return by how many bytes 300 sizes of product make a process larger."""
    env = {**os.environ, **PINS, **variables}
    done = subprocess.run([sys.executable, "-c", GROWTH], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not NATIVE, reason="kernels for this CPU are too small to be seen given back")
def test_a_process_keeps_as_many_kernels_as_both_variables_say() -> None:
    few = int(STRATEGY.environment[VARIABLE])
    assert grown({}) > 0.8 * 300 * KERNEL
    assert grown(dict(STRATEGY.environment)) < 1.5 * few * KERNEL
    assert grown({VARIABLE: str(few)}) > 2 * few * KERNEL, "torch's own cache is above that of the library"


def test_the_prediction_counts_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "KERNEL", 1 << 15)  # the library of this processor may keep none

    def peak(environment: dict[str, str]) -> int:
        def step(parts: Parts, state: torch.Tensor, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for rows in range(1, 101):
                torch.empty(rows, 8, dtype=torch.bfloat16) @ torch.empty(8, 8, dtype=torch.bfloat16)
            return state, torch.zeros(())

        parts = Parts(None, Place("torch", "cpu"), init=lambda parts, seed: torch.zeros(1), step=step)
        batch = [((1,), "int32")] * 2
        return predict(lambda: parts, parts.place, batch, 0, 3, environment=environment).peaks["steady_step"]

    few = int(STRATEGY.environment[VARIABLE])
    assert CAPACITY > 100 > few
    assert peak({}) - peak(dict(STRATEGY.environment)) == (100 - few) << 15


def test_a_gpu_has_other_libraries() -> None:
    case = Case(
        workload="decoder", shape={}, place="torch/cuda", corpus="drawn", tokenizer="none",
        strategies=(Applied(name="small_kernel_cache"),),
    )  # fmt: skip
    reason = STRATEGY.obstacle(case.place, plugins.load().workloads["decoder"])
    assert reason is not None and "other libraries" in reason
