"""Measure the fused loss against `torch.nn.functional.linear_cross_entropy` and print a markdown table.

8192 tokens, width 512, vocabulary 32000, loss forward and backward on the CPU with two threads. A peak is
that of a fresh process with a pinned malloc, above its inputs (VmHWM); times are taken in another process
with the malloc of every day, the rivals in turn, the median of five. The figure to beat is the better of
torch's own choice of chunks and one other, for peak, time and error apart. On a busy machine the times mean
nothing. Exit code 1 when a target is missed.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENS, WIDTH, VOCABULARY, ROUNDS = 8192, 512, 32000, 5
BYTES = {"float32": 4, "bfloat16": 2}
RIVALS = {"float32": ("auto", "256"), "bfloat16": ("auto", "512")}
PINNED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_MMAP_MAX_": "1000000",
}


def problem(dtype: str, n: int = TOKENS, D: int = WIDTH, V: int = VOCABULARY) -> tuple[Any, Any, Any]:
    """Make hidden states and a weight that give logits of variance 1, and random targets."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(n, D).to(getattr(torch, dtype)).requires_grad_()
    w = (torch.randn(V, D) / D**0.5).to(getattr(torch, dtype)).requires_grad_()
    return x, w, torch.randint(V, (n,))


def step(which: str) -> Callable[[Any, Any, Any], float]:
    """Return forward and backward of `fused`, or of torch's function with `auto` or N rows per chunk."""
    import torch

    from strategies.fused_loss.on_torch import fused_loss

    def run(x: Any, w: Any, y: Any) -> float:
        x.grad = w.grad = None
        if which == "fused":
            loss = fused_loss(x, w, y)
        else:
            size = None if which == "auto" else int(which)
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=size)
            loss = torch.nn.functional.linear_cross_entropy(x, w, y, options=options)
        loss.backward()
        return float(loss.item())

    return run


def status(field: str) -> int:
    """Read a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak(dtype: str, which: str) -> dict[str, float]:
    """Measure one forward and backward in this process, which must be fresh."""
    run = step(which)
    run(*problem(dtype, 64, 32, 128))
    inputs = problem(dtype)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loss = run(*inputs)
    return {"peak_bytes": status("VmHWM") - before, "loss": loss}


def times(dtype: str, *which: str) -> dict[str, float]:
    """Return the median seconds of each, taken in turn after one turn that is not counted."""
    runs, inputs = {name: step(name) for name in which}, problem(dtype)
    seconds: dict[str, list[float]] = {name: [] for name in which}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(*inputs)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def true_loss(dtype: str) -> dict[str, float]:
    """Return the loss in float64 of the same (rounded) inputs."""
    import torch

    x, w, y = (t.detach() for t in problem(dtype))
    w = w.double()
    total = sum(
        torch.nn.functional.cross_entropy(x[i : i + 512].double() @ w.T, y[i : i + 512], reduction="sum").item()
        for i in range(0, TOKENS, 512)
    )
    return {"loss": total / TOKENS}


def fresh(*arguments: str, pinned: bool = False) -> dict[str, Any]:
    """Run one of the functions above in a fresh process and return what it measured."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    environment |= {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)} | (PINNED if pinned else {})
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def figures(dtype: str) -> tuple[list[str], bool]:
    """Measure one type; return the row of the table and whether its targets are met."""
    floor = (TOKENS + VOCABULARY) * WIDTH * BYTES[dtype]
    truth = fresh("true_loss", dtype)["loss"]
    peaks = {which: fresh("peak", dtype, which, pinned=True) for which in ("fused", *RIVALS[dtype])}
    seconds = fresh("times", dtype, "fused", *RIVALS[dtype])
    error = {which: abs(result["loss"] / truth - 1) for which, result in peaks.items()}
    ours, best = peaks["fused"]["peak_bytes"], min(peaks[which]["peak_bytes"] for which in RIVALS[dtype])
    speed = seconds["fused"] / min(seconds[which] for which in RIVALS[dtype])
    if dtype == "float32":
        target, met = "peak 1.35 x gradients, time 1.11", ours <= 1.35 * floor and speed <= 1 / 0.9
    else:
        target, met = (
            "peak 0.5, time 0.5, error 1e-5",
            ours <= 0.5 * best and speed <= 0.5 and error["fused"] <= 1e-5,
        )
    cells = [
        dtype,
        f"{ours / 1e6:.1f} MB",
        f"{ours / floor:.2f}",
        f"{ours / best:.2f}",
        f"{seconds['fused']:.2f} s",
    ]
    cells += [f"{speed:.2f}", f"{error['fused']:.1e}", f"{min(error[w] for w in RIVALS[dtype]):.1e}", target]
    return [*cells, "met" if met else "**missed**"], met


def main() -> int:
    """Print the table; return the exit code."""
    head = [
        "type",
        "peak",
        "/ its gradients",
        "/ native peak",
        "time",
        "/ native time",
        "loss error",
        "native's",
    ]
    head += ["target", "verdict"]
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head), flush=True)
    verdicts = []
    for dtype in BYTES:
        cells, met = figures(dtype)
        print("| " + " | ".join(cells) + " |", flush=True)
        verdicts.append(met)
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    work = {"peak": peak, "times": times, "true_loss": true_loss}[sys.argv[1]]
    print(json.dumps(work(*sys.argv[2:])))
