"""Write down what the harness supposes of a GPU and its libraries, each fact apart: `python gpu/probe.py OUT.json`.

With `--cpu` it finds out what it can without a GPU. A fact that fails has an `error`, and the next one is tried.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness import backends
from harness.backends import nvml
from harness.contract.place import Place
from harness.machine import facts, gpu, memory
from harness.worker import throughput

MIB = 1 << 20
PACKAGES = (
    "torch triton jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt numpy pydantic nvidia-ml-py nvidia-cudnn-cu13 "
    "liger-kernel cut-cross-entropy"
)
VARIABLES = ("CUDA", "NVIDIA", "LD_LIBRARY", "XLA", "TORCH", "TRITON", "PYTORCH")
FACTS: list[Callable[[str], Any]] = []


def fact(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let a function of the device be one of the facts, under its own name."""
    FACTS.append(function)
    return function


@fact
def machine(device: str) -> Any:
    """What the machine is, and what the driver's tool says of its GPU."""
    seen = gpu.detect()
    names = (name for name in os.environ if name.startswith(VARIABLES))
    return {
        "facts": facts.facts(),
        "gpu": None if seen is None else asdict(seen),
        "state": None if (state := gpu.state()) is None else asdict(state),
        "kernel": platform.release(),
        "environment": {name: os.environ[name] for name in names},
    }


@fact
def driver_files(device: str) -> Any:
    """Which of the files that show a driver are there, and whether the kernel resets the host's mark."""
    files = {path: Path(path).exists() for path in backends.DRIVER_FILES}
    try:
        memory.reset_peak()
    except OSError as error:
        return files | {"clear_refs": str(error)}
    return files | {"clear_refs": True}


@fact
def packages(device: str) -> Any:
    """The versions of all packages that matter."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES.split():
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


@fact
def context(device: str) -> Any:
    """What a process holds on the device with one number on it: the driver's count, and what torch sees as free.

    It is the first fact that uses the device in this process, since libraries that others load stay there.
    """
    view = nvml.opened(device)
    import torch

    torch.ones(1, device=device)
    figures = {"driver": view.used(), "reason": view.reason}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures |= {"free": free, "total": total, "reserved": torch.cuda.memory_reserved()}
    return figures


@fact
def rates(device: str) -> Any:
    """What torch multiplies and moves in a second, on random data."""
    return throughput.measured(Place("torch", device))


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Count in MiB what torch's allocator handed out in the block, at its most and at its end."""
    import torch

    figures: dict[str, float] = {}
    if not torch.cuda.is_available():
        yield figures
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield figures
    torch.cuda.synchronize()
    figures["peak"] = (torch.cuda.max_memory_allocated() - before) / MIB
    figures["left"] = (torch.cuda.memory_allocated() - before) / MIB
    figures["reserved"] = torch.cuda.memory_reserved() / MIB


@fact
def blocks(device: str) -> Any:
    """What one tensor of some MiB is counted as: a block is split only where more than 1 MiB is left over."""
    import torch

    counts = {}
    for mib in (1.5, 10.5, 19.5, 20.5, 33.3, 100.01):
        with counted() as figures:
            tensor = torch.empty(int(mib * MIB), dtype=torch.uint8, device=device)
        counts[mib] = dict(figures)
        del tensor
    return counts


@fact
def workspaces(device: str) -> Any:
    """What the library of products keeps: once for each thread, so the first backward pass takes a second."""
    import torch

    a = torch.randn(512, 512, device=device, requires_grad=True)
    with counted() as forward:
        value = (a @ a).sum()
    with counted() as backward:
        value.backward()
    return {"forward": forward, "backward": backward}


@fact
def attention(device: str) -> Any:
    """What attention takes by type and by heads of keys; the scores of all pairs would be 512 MiB and more."""
    import torch
    import torch.nn.functional as F

    tokens = 4096 if device == "cuda" else 128
    taken = {}
    for dtype in (torch.float32, torch.bfloat16):
        for groups in (8, 2):
            q = torch.randn(1, 8, tokens, 64, device=device, dtype=dtype, requires_grad=True)
            k = torch.randn(1, groups, tokens, 64, device=device, dtype=dtype, requires_grad=True)
            with counted() as figures:
                y = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=groups < 8)
                torch.autograd.grad(y.sum(), (q, k))
                del y
            taken[f"{dtype} {groups} of 8"] = dict(figures)
    return taken


@fact
def pinned(device: str) -> Any:
    """What 3 MiB of page-locked memory are counted as: blocks are powers of two."""
    import torch

    if device == "cpu":
        return None
    block = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    return {"bytes": block.nbytes, "counted": torch.cuda.host_memory_stats().get("allocated_bytes.current")}


IN_JAX = """
import json, sys
import jax, jax.numpy as jnp
device = jax.devices(sys.argv[1])[0]
def stats():
    return device.memory_stats() or {}
counters = {"kind": device.device_kind, "before": stats()}
product = jax.jit(lambda x: jnp.tanh(x @ x).sum())
x = jnp.ones((2048, 2048), jnp.bfloat16)
counters["with an array"] = stats()
product.lower(x).compile()
counters["compiled"] = stats()
product(x).block_until_ready()
counters["run"] = stats()
q = jnp.ones((1, 256, 4, 64), jnp.bfloat16)
way = "cudnn" if sys.argv[1] == "gpu" else "xla"
jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation=way).block_until_ready()
counters["attention"] = stats()
print(json.dumps(counters))
"""


@fact
def in_jax(device: str) -> Any:
    """The counters of JAX's allocator before and after compiling, and whether cuDNN's attention runs."""
    if (reason := backends.absent("jax", device)) is not None:
        return reason
    env = {**os.environ, "JAX_PLATFORMS": "cuda,cpu" if device == "cuda" else "cpu"}
    env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    command = [sys.executable, "-c", IN_JAX, "gpu" if device == "cuda" else "cpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    results: dict[str, Any] = {}
    for function in FACTS:
        started, name = time.monotonic(), function.__name__
        try:
            results[name] = function(device)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        line = json.dumps(results[name], default=str)[:300]
        print(f"{time.monotonic() - started:5.1f} s  {name}: {line}", flush=True)
        options.out.write_text(json.dumps(results, indent=1, default=str))  # as far as it came, whatever ends it
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
