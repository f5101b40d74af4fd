"""Touch a known number of bytes in one way and print what the meter saw.

`python -m harness.worker.calibration WAY BYTES`.

The ways: anonymous memory, a mapped file, a child process, a torch tensor, a JAX computation, a CUDA tensor.
"""

import json
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from harness.machine import memory

MIB = 1 << 20


def anonymous(size: int) -> Any:
    """Map private memory and write every page."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size, mmap.PAGESIZE):
        block[offset] = 1
    return block


def mapped_file(size: int) -> Any:
    """Map a file and read every page of it."""
    with tempfile.TemporaryFile() as file:
        for _ in range(size // MIB):
            file.write(b"\1" * MIB)
        file.flush()
        block = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    return block, sum(block[offset] for offset in range(0, size, mmap.PAGESIZE))


def in_torch(size: int) -> Any:
    """Fill a torch tensor."""
    import torch

    return torch.ones(size // 4)


def in_jax(size: int) -> Any:
    """Fill a JAX array by a program compiled beforehand."""
    import jax
    import jax.numpy as jnp

    return jax.block_until_ready(_jax_fill(jax, jnp, size)())


_compiled: dict[int, Callable[[], Any]] = {}


def _jax_fill(jax: Any, jnp: Any, size: int) -> Callable[[], Any]:
    if size not in _compiled:
        _compiled[size] = jax.jit(lambda: jnp.ones(size // 4, jnp.float32)).lower().compile()
    return _compiled[size]


def _prime(way: str, size: int) -> None:
    WAYS[way](MIB)
    if way == "jax":
        import jax
        import jax.numpy as jnp

        _jax_fill(jax, jnp, size)


WAYS: dict[str, Callable[[int], Any]] = {
    "anonymous": anonymous,
    "mapped file": mapped_file,
    "torch": in_torch,
    "jax": in_jax,
}


def seen(way: str, size: int) -> int:
    """Return the bytes that the meter saw for `size` bytes touched."""
    if way == "cuda":
        import torch

        torch.cuda.init()
        before = torch.cuda.memory_allocated()
        torch.ones(size // 4, device="cuda")
        return torch.cuda.max_memory_allocated() - before
    _prime(way, size)
    memory.settle()
    meter = memory.PhaseMeter()
    meter.start()
    with meter.phase("touch"):
        block = WAYS[way](size)
    del block
    return meter.peak_bytes


def in_child(size: int) -> int:
    """Return what is seen from outside of a child that holds the bytes and waits for its standard input."""
    code = (
        f"import sys, harness.worker.calibration as c; b = c.anonymous({size}); print(1, flush=True); sys.stdin.read()"
    )
    empty = code.replace(f"c.anonymous({size})", "None")
    peaks = []
    for text in (empty, code):
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, text=True) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            peaks.append(memory.read(child.pid).peak)
            child.stdin.close()
    return peaks[1] - peaks[0]


if __name__ == "__main__":
    way, size = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"seen": in_child(size) if way == "child" else seen(way, size)}))
