"""The environment of a worker: an allow-list, and what makes its figures comparable."""

import ctypes
import os
import sys
from pathlib import Path

from harness import backends
from harness.machine import facts, gpu, orphans
from harness.records import Kind
from harness.records.place import Place

PASSED = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TMPDIR",
    "USER",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
]

PINS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_MMAP_MAX_": "1000000",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
"""What makes the resident set follow live bytes: large blocks are mapped alone and returned when freed."""

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""The library starts its threads when NumPy is imported."""
RUN_VARIABLE = "HARNESS_RUN"
"""By this a process shows of which run it is, and by `orphans.VARIABLE` of which harness."""
COMPILED_BEFORE = ("predict", "reference", "numerics", "contract", "pilot", "time")
"""Kinds whose compiled programs may come from a cache: what compiling costs, and leaves in the heap, is no figure of
theirs.

Their figures are the same: of 35.7 MiB predicted in JAX no byte differs, and the second worker of a program takes a
sixth of the first one's time.
"""

COMPARING = ("reference", "numerics", "contract")
"""Kinds in which answers are compared."""


def cache_folder() -> Path:
    """Return the folder of what is worth keeping between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness"


def programs(backend: str) -> Path:
    """Return the folder of what a framework compiled on this machine."""
    return cache_folder() / f"{backend}-programs" / facts.name()


def _can_keep(folder: Path) -> bool:
    """Check whether programs can be kept in a folder; where not, each worker compiles its own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def variables(
    kind: Kind, place: Place, run_id: str, threads: int, budget: int | None, ranks: int = 1
) -> dict[str, str]:
    """Build a worker's environment; the memory worker's allocator is pinned, the time worker's is native.

    Ranks that are processes share the threads; those that are devices of one process have them all.
    """
    backend, device = place
    threads = max(1, threads // backends.processes(backend, ranks))
    env = {name: os.environ[name] for name in PASSED if name in os.environ}
    count = str(1 if kind in COMPARING else threads)
    env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", BLAS_THREADS), count)
    env |= {
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **({} if _imports_from_here() else {"PYTHONSAFEPATH": "1"}),
        RUN_VARIABLE: run_id,
        orphans.VARIABLE: orphans.mark(),
    }
    if kind == "memory":
        env |= PINS
    if backend == "torch" and kind in COMPILED_BEFORE and _can_keep(programs("torch")):
        env["TORCHINDUCTOR_CACHE_DIR"] = str(programs("torch"))
    if device == "cuda":
        env |= _gpu_variables(kind, backend)
    if backend == "jax":
        env |= _jax_variables(kind, device, budget, ranks)
    return env


def _imports_from_here() -> bool:
    """Check whether this process imports from the folder that it runs in: what it starts by `-m` would in any case."""
    return "" in sys.path or os.getcwd() in sys.path


def _gpu_variables(kind: Kind, backend: str) -> dict[str, str]:
    """Number GPUs as the driver does; where answers are compared, leave the libraries no choice that may differ."""
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if backend == "torch":
        env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of compilers would be measured as children
        if kind in COMPARING:
            env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return env


def _jax_variables(kind: Kind, device: str, budget: int | None, ranks: int) -> dict[str, str]:
    on_gpu = device == "cuda" and kind != "predict"  # predictions need no device: the compiler is told of one
    env = {"JAX_PLATFORMS": "cuda,cpu" if on_gpu else "cpu"}
    if flags := _xla_flags(kind, device):
        env["XLA_FLAGS"] = " ".join(flags)
    if kind in COMPILED_BEFORE and _can_keep(programs("jax")):
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(programs("jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    if ranks > 1:
        env["JAX_NUM_CPU_DEVICES"] = str(ranks)
    if on_gpu:
        total = gpu.usable_bytes()
        share = min(facts.DEVICE_SHARE, budget / total) if budget and total else facts.DEVICE_SHARE
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.6f}"
        if kind not in ("time", "pilot"):
            env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return env


def _xla_flags(kind: Kind, device: str) -> list[str]:
    """Return the compiler's flags of a worker.

    On a GPU it times kernels with arrays of its own, which would lie in the peak, and may choose others each time: only
    a worker that is timed lets it.
    """
    flags = ["--xla_backend_optimization_level=0"] if kind == "contract" else []  # many small programs, run a few times
    if device == "cuda":
        flags += ["--xla_gpu_autotune_level=0"] if kind not in ("time", "pilot") else []
        flags += ["--xla_gpu_deterministic_ops=true"] if kind in COMPARING else []
    return flags


def regime() -> str:
    """Check whether the allocator of this process is pinned, or native."""
    glibc = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    pinned = all(os.environ.get(name) == value for name, value in PINS.items())
    return "glibc-pinned" if glibc and pinned else "native"
