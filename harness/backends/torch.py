"""torch: eager steps, allocator counters on CUDA, and prediction by running the same step on fake tensors."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from harness.backends import NO_VARIABLES, Batch, Sizes, Step, Unavailable
from harness.backends.torch_packing import WARMED
from harness.contract.parts import Parts
from harness.contract.place import Place
from harness.contract.protocols import Array, DrawPart, Tree
from harness.contract.toolkit import trees
from harness.records.forecast import Forecast

EAGER = True
"""Whether a step can be resolved into phases while it runs."""

_base: dict[str, int] = {}

OUT_OF_DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""How libraries beside torch's allocator say that the device's memory ran out."""
OUT_OF_HOST_MEMORY = ("not enough memory", "Cannot allocate memory", "bad_alloc", "Caught MemoryError in ")
"""How libraries say that the host's memory ran out: the last is a worker of a DataLoader."""
LEAST_FREE = 64 << 20
"""Bytes that are free on a device whose memory did not run out."""


def start(place: Place) -> dict[str, str]:
    """Make the device ready; return its facts. Raises Unavailable where there is none."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if place.device == "cpu":
        return {"threads": str(torch.get_num_threads())}
    if torch.version.cuda is None:
        raise Unavailable("this torch is a build for the CPU: install a CUDA build of it, as docs/gpu.md says")
    try:
        torch.cuda.init()
        name = torch.cuda.get_device_name()
    except (RuntimeError, AssertionError) as error:  # no device, or a driver that is too old, in the driver's words
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"torch finds no GPU that it can use: {reason}") from None
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "as it is")
    return {"device": name, "cuda": torch.version.cuda, "allocator": allocator}


def warm(place: Place) -> None:
    """Multiply once at the library's full block size, so that its packing buffers lie in the base.

    They are kept for the life of the process, and a product that needs larger ones takes new ones beside them: in an
    order that grows, 33 MiB on two threads. After this one, the least of those tried that takes the largest, they grow
    by less than 1 MiB more on AMD's processors; see `torch_packing` for Intel's, and `torch_kernels` for bfloat16.
    """
    rows, columns, depth = WARMED
    left, right = torch.ones(rows, depth, device=place.device), torch.ones(depth, columns, device=place.device)
    left @ right


def deterministic(place: Place, strict: bool = True) -> None:
    """Ask for the same bits each time; used where answers are compared.

    Strictly: an operation that has no such form raises RuntimeError. Otherwise it warns, and the backward pass of
    attention does not even try. On the CPU one thread gives the same bits already, and asking would import the
    compiler, a second of every worker.
    """
    if place.device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=not strict)


def double() -> AbstractContextManager[object]:
    """Let arrays of 64 bits be made: torch always does."""
    return nullcontext()


def cap(place: Place, budget: int | None) -> int | None:
    """Bound the segments of the caching allocator to a budget in bytes above what was live, without the context.

    None where the device has less to give, so that it is the device that refuses, and not the budget.
    """
    if place.device == "cpu" or budget is None:
        return None
    free, total = torch.cuda.mem_get_info()
    if budget >= free:
        return None
    torch.cuda.set_per_process_memory_fraction((budget + _base.get("allocated", 0)) / total)
    return budget


def prepare(parts: Parts, batch: Any = None, abstract: Parts | None = None) -> Step:
    """Return the step: torch runs it eagerly, so nothing is compiled."""
    return partial(parts.step, parts)


def like(batch: Sizes, device: str = "cpu") -> tuple[Array, ...]:
    """Make a batch without data for `predict`; integers become int64, as the loop hands them over."""
    return tuple(
        torch.zeros(
            size,
            dtype=torch.int64 if dtype.startswith(("int", "uint")) else getattr(torch, dtype),
            device=device,
        )
        for size, dtype in batch
    )


def wait(outputs: Tree) -> None:
    """Return when the device has computed everything asked for."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def finish(outputs: Tree) -> Any:
    """End one turn: the clock on the CPU, an event in the stream on CUDA (nothing waits)."""
    if torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter_ns()


def seconds(marks: Sequence[Any]) -> list[float]:
    """Turn marks into the seconds between them."""
    if marks and not isinstance(marks[0], int):
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return [(b - a) / 1e9 for a, b in pairwise(marks)]


def clear(place: Place) -> None:
    """Empty the allocator's cache and take the bytes still held as the base."""
    if place.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reset_peak(place)
        stats = torch.cuda.memory_stats()
        _base.update(
            allocated=stats["allocated_bytes.all.current"],
            requested=stats["requested_bytes.all.current"],
            retries=stats["num_alloc_retries"],
            pinned=_pinned("current"),
        )


def reset_peak(place: Place) -> None:
    """Begin a new device peak."""
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()


def peak(place: Place) -> dict[str, int]:
    """Read the allocators' peaks since the last reset, in bytes above the base: what was live then.

    Segments count above the same base, since a budget bounds them so; `pinned` is page-locked memory of the host, in
    blocks of powers of two.
    """
    if place.device == "cpu":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"] - _base.get("allocated", 0),
        "requested": stats["requested_bytes.all.peak"] - _base.get("requested", 0),
        "reserved": stats["reserved_bytes.all.peak"] - _base.get("allocated", 0),
        "retries": stats["num_alloc_retries"] - _base.get("retries", 0),
        "pinned": _pinned("peak") - _base.get("pinned", 0),
    }


def in_use(place: Place) -> int | None:
    """Read the bytes that the device's allocator has handed out now, above the base; None on the CPU."""
    return torch.cuda.memory_allocated() - _base.get("allocated", 0) if place.device == "cuda" else None


def tracing() -> bool:
    """Return whether torch's compiler is looking at the code that runs."""
    return bool(torch.compiler.is_compiling())


def _pinned(which: str) -> int:
    return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{which}", 0))


def reserved(place: Place) -> int | None:
    """Return the bytes that the allocator has taken from the driver; None on the CPU."""
    return torch.cuda.memory_reserved() if place.device == "cuda" else None


def peaks(place: Place) -> list[int]:
    """Read the allocator's peak of the one device that this process uses; none on the CPU."""
    return [peak(place)["allocated"]] if place.device == "cuda" else []


def ran_out(error: BaseException) -> str | None:
    """Return whose memory ran out, by the type and words of the error; None for any other."""
    text = str(error)
    of_nccl = "NCCL" in text and "out of memory" in text  # it says so some lines after the error's name
    if isinstance(error, torch.OutOfMemoryError) or of_nccl or any(words in text for words in OUT_OF_DEVICE_MEMORY):
        return "device"
    if "CUDA error: out of memory" in text:  # page-locked memory of the host ends so too
        return "host" if torch.cuda.mem_get_info()[0] > LEAST_FREE else "device"
    host = isinstance(error, MemoryError) or any(words in text for words in OUT_OF_HOST_MEMORY)
    return "host" if host else None


def abstract_draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Array:
    """Stand in for the drawing of a parameter where no values are wanted."""
    return torch.empty(shape, dtype=torch.float32, device=parts.place.device)


def predict(
    build: Callable[[], Parts],
    place: Place,
    batch: Batch,
    source_bytes: int,
    steps: int,
    ranks: int = 1,
    environment: Mapping[str, str] = NO_VARIABLES,
) -> Forecast:
    """Run the loop from `init` on fake tensors, as the first of the ranks.

    Those of a GPU stand for a device that need not be there; see `torch_memory` and `torch_cuda`.
    """
    from harness.backends import torch_cuda, torch_memory

    with pretended(ranks):
        if place.device == "cuda":
            return torch_cuda.run(build, batch, steps, environment)
        return torch_memory.run(build, batch, source_bytes, steps, environment)


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """Pretend to be the first of so many ranks, without any others: collectives give arrays of the right sizes."""
    if ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def agreed(flag: bool) -> bool:
    """Return whether the flag is set on any rank; in one process, whether it is set."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flag
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(float(flag), device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return bool(largest)


def arrays(values: Tree) -> dict[str, tuple[Any, str]]:
    """Copy each leaf to numpy, bfloat16 widened exactly to float32, with the name of its own dtype."""
    copies: dict[str, tuple[Any, str]] = {}
    for name, leaf in trees.leaves(values):
        if leaf is None:
            copies[name] = (None, "")
            continue
        tensor = leaf.detach().cpu()
        dtype = str(tensor.dtype).removeprefix("torch.")
        copies[name] = ((tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()).numpy(), dtype)
    return copies


def cast(inner: DrawPart, dtype: str) -> DrawPart:
    """Draw in another dtype: float64 for the reference, a declared precision for its own yardstick."""

    def draw(parts: Parts, name: str, shape: tuple[int, ...], deviation: float) -> Any:
        return inner(parts, name, shape, deviation).to(getattr(torch, dtype))

    return draw


def buffer(array: Array) -> memoryview:
    """Return the bytes of a tensor on the host, to be read or written."""
    return memoryview(array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).cast("B")
