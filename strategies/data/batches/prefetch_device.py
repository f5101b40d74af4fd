"""Start the transfer of the next batch before this one is handed out; pay one more batch on the device.

Peak: 1 + `depth` batches on the device, where a CPU is its own device; on CUDA as many in pinned memory on the host.
There the copy runs in a stream of its own (torch), and the step waits for its own batch alone; JAX queues transfers by
itself. On a CPU nothing runs meanwhile. flax's `prefetch_to_device` does the same.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import Extent, Held, Parts, Strategy, Windows, hookimpl

Batches = Iterator[tuple[Any, Any]]


def ahead(flow: Iterator[Any], depth: int) -> Iterator[Any]:
    """Take `depth` items more from an iterator than were handed out."""
    waiting: deque[Any] = deque()
    for item in flow:
        waiting.append(item)
        del item
        if len(waiting) > depth:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def checked(depth: int) -> int:
    if depth < 1:
        raise ValueError(f"prefetch_device: {depth} batches ahead is none: set depth to 1 or more")
    return depth


def less(windows: Windows, depth: int) -> Windows:
    """Leave to the inner batches what the windows keep beyond the ones ahead."""
    lasts = windows.lasts
    if lasts is None:
        return windows
    if lasts < depth + 1:
        most = f"set depth to {lasts - 1}" if lasts > 1 else "no depth is small enough"
        raise ValueError(
            f"prefetch_device keeps {depth + 1} batches at a time with depth {depth}, but the windows keep only the "
            f"last {lasts} as they were: {most}, or let the windows keep {depth + 1}"
        )
    return replace(windows, lasts=lasts - depth)


def on_torch(parts: Parts, depth: int = 1) -> Parts:
    inner, depth = parts.batches, checked(depth)

    def batches(parts: Parts, windows: Windows) -> Batches:
        if parts.place.device == "cuda":
            return streamed(parts, inner(replace(parts, transfer=pinned), windows), depth)
        return ahead(inner(parts, less(windows, depth)), depth)

    return replace(parts, batches=batches)


def pinned(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
    """Copy a batch to memory that the device can read while the host goes on."""
    import torch

    found = (torch.as_tensor(a) for a in (x, y))
    return tuple(a if a.is_cuda else a.pin_memory() for a in found)  # type: ignore[return-value]


def streamed(parts: Parts, flow: Batches, depth: int) -> Batches:
    """Copy in a stream of its own; let the stream of the step wait for the batch that it gets."""
    import torch

    copying = torch.cuda.Stream()

    def started() -> Iterator[Any]:
        for x, y in flow:
            with torch.cuda.stream(copying):
                on_device = (a.to(parts.place.device, non_blocking=True) for a in (x, y))
                moved = parts.transfer(parts, *on_device)
            del x, y
            yield moved, copying.record_event()
            del moved

    def arrived(batch: Any, event: Any) -> Any:
        stepping = torch.cuda.current_stream()
        stepping.wait_event(event)
        for tensor in batch:
            tensor.record_stream(stepping)  # or the allocator would give it to the next copy too early
        return batch

    for item in ahead(started(), depth):
        batch = arrived(*item)
        del item
        yield batch
        del batch


def on_jax(parts: Parts, depth: int = 1) -> Parts:
    inner, depth = parts.batches, checked(depth)

    def batches(parts: Parts, windows: Windows) -> Batches:
        return ahead(inner(parts, less(windows, depth)), depth)

    return replace(parts, batches=batches)


def holds(extent: Extent, depth: int = 1) -> Held:
    """Hold the batches ahead, beside the one in use."""
    return Held(batches=depth * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "prefetch_device",
            rewrites=("batches",),
            on={"torch": on_torch, "jax": on_jax},
            about=__doc__,
            holds=holds,
        )
    ]
