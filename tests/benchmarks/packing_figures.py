"""Measure what Intel's library keeps of products in float32: `python tests/benchmarks/packing_figures.py`.

Each product runs in a process of its own, which prints the growth of its anonymous memory and what is predicted.
"""

import ctypes
import gc
import subprocess
import sys

import torch

from harness.backends.torch_packing import packed

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
"""Rows, columns and depths."""


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def kept(threads: int, rows: int, columns: int, depth: int) -> int:
    """Return the bytes that stay after the first product of this size."""
    torch.set_num_threads(threads)
    torch.mm(torch.randn(64, 64), torch.randn(64, 64))
    a, b, out = torch.randn(rows, depth), torch.randn(columns, depth).t(), torch.zeros(rows, columns)
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
