"""What the libraries of the CPU keep between products: predicted, or taken before anything is measured."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends.torch_memory import KERNEL, LiveStorage
from harness.machine import environment


def taken(dtype: torch.dtype, sizes: list[int]) -> int:
    """Return the bytes that products of such squares are predicted to leave, their results apart."""
    with FakeTensorMode(), LiveStorage() as live:
        for size in sizes:
            square = torch.empty(size, size, dtype=dtype)
            square @ square
            del square
        return live.live


def test_a_kernel_is_counted_once_for_each_size_in_bfloat16_on_the_cpu() -> None:
    assert 0.5 <= KERNEL / (1 << 20) <= 0.6, "what was measured"
    assert taken(torch.bfloat16, [64, 64, 128]) == 2 * KERNEL
    assert taken(torch.float32, [64, 128]) == 0


PRODUCTS = """
import re, sys
from pathlib import Path
import torch
from harness import Place
from harness.backends import torch as backend

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

place = Place("torch", "cpu")
backend.start(place)
if sys.argv[1] == "warm":
    backend.warm(place)
grown = 0
for m, k, n in ((64, 64, 64), (256, 1024, 4096), (1024, 256, 8192), (512, 512, 16384)):
    a, b, out = torch.ones(m, k), torch.ones(k, n), torch.ones(m, n)
    before = resident()
    torch.mm(a, b, out=out)
    grown += resident() - before
print(grown)
"""


def grown(way: str) -> int:
    """Return by how many KiB the products make a process larger."""
    env = {**os.environ, **environment.PINS, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PRODUCTS, way], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_after_a_warm_start_no_product_makes_the_process_larger() -> None:
    if "mkl" not in torch.__config__.show().lower():
        pytest.skip("this torch has another library for products")
    assert grown("warm") < 2048 < grown("cold")
