"""Measure what Intel's library keeps of products in float32: `python tests/benchmarks/packing_figures.py`.

Each product runs in a process of its own, which prints the growth of its anonymous memory and what is predicted.
"""

import ctypes
import gc
import subprocess
import sys

import torch

from harness.backends.torch_packing import WARMED, packed

MIB = 1 << 20
SHAPES = (
    (128, 16384, 256), (256, 16384, 256), (512, 16384, 256), (1024, 256, 256), (1024, 688, 256), (1024, 1024, 256),
    (1024, 4096, 256), (1024, 16384, 128), (1024, 16384, 256), (1024, 16384, 512), (1024, 16384, 1024),
    (1024, 32000, 256), (2560, 16384, 256), (4096, 1024, 1024), (1024, 1024, 4096), (1024, 4096, 1024),
    (4096, 4096, 1024), (256, 16384, 1024), (16384, 256, 1024), (1024, 256, 16384), (1024, 256, 32000),
    (2560, 256, 16384), (2560, 512, 16384), (8192, 256, 16384), (16384, 256, 8192),
    *((256, 16384, depth) for depth in (192, 320, 384, 448, 576, 640, 704, 768, 896, 2048)),
    (1024, 32768, 384), (256, 32768, 384), (512, 49152, 576), (512, 50304, 768),
)  # fmt: skip
"""Rows, columns and depths of products in a new process."""
AFTER = (
    (512, 512, 4096), (512, 512, 8192), (1024, 1024, 8192), (256, 1024, 2048), (256, 1024, 4096), (1024, 256, 2048),
    (1024, 256, 4096), (512, 384, 32768), (2048, 512, 8192), (4096, 512, 10000), (4096, 512, 50304), (1024, 512, 10000),
    (1024, 576, 49152), (2048, 512, 4096), (1536, 512, 4096), (512, 2048, 4096), (10000, 512, 4096), (50304, 512, 4096),
)  # fmt: skip
"""Those of deep products after the one that every worker begins with; those deep as 4,096 tokens are of a weight."""
OF_WEIGHTS = 4096


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def kept(threads: int, rows: int, columns: int, depth: int, after: int = 0) -> int:
    """Return the bytes that stay after the first product of this size, in a new process or `after` a larger one."""
    torch.set_num_threads(threads)
    torch.mm(torch.randn(64, 64), torch.randn(64, 64))
    a, b, out = torch.randn(rows, depth), torch.randn(columns, depth).t(), torch.zeros(rows, columns)
    if after:
        torch.mm(torch.ones(WARMED[0], WARMED[2]), torch.ones(WARMED[2], WARMED[1]))
        a = torch.randn(depth, rows).t() if depth == OF_WEIGHTS and rows > 1024 else a
        b = torch.randn(depth, columns)
    before = resident()
    torch.mm(a, b, out=out)
    return resident() - before


def main() -> int:
    if len(sys.argv) > 1:
        print(kept(*map(int, sys.argv[1:])))
        return 0
    for threads in (1, 2):
        for shape in SHAPES:
            command = [sys.executable, __file__, str(threads), *map(str, shape)]
            measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / MIB
            expected = packed(*shape, threads) / MIB
            print(f"{threads} threads, {shape}: {measured:.1f} MiB, predicted {expected:.1f}", flush=True)
    for shape in AFTER:
        command = [sys.executable, __file__, "2", *map(str, shape), "1"]
        measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / MIB
        print(f"after a larger one, {shape}: {measured:.1f} MiB, predicted {packed(*shape, 2) / MIB:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
