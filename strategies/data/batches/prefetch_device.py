"""Start the transfer of the next batch before this one is handed out; pay one more batch on the device.

Peak: 1 + `depth` batches on the device (a CPU is its own device); on CUDA as many in pinned memory on the host. There
the copy runs in a stream of its own (torch), and the step waits only for its own batch; JAX queues transfers by itself.
On a CPU nothing overlaps. flax's `prefetch_to_device` does the same.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import Extent, Holding, Parts, Strategy, Windows, hookimpl
from strategies.data.batches.prefetch_thread import reserved

Batches = Iterator[tuple[Any, Any]]


def ahead(flow: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yield the items of an iterator, which is always `depth` items ahead."""
    waiting: deque[Any] = deque()
    for item in flow:
        waiting.append(item)
        del item
        if len(waiting) > depth:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def on_torch(parts: Parts, depth: int = 1) -> Parts:
    untouched, host = parts, on_any(parts, depth)

    def batches(parts: Parts, windows: Windows) -> Batches:
        if parts.place.device == "cuda":
            return streamed(parts, untouched.batches(replace(parts, transfer=pinned), windows), depth)
        return host.batches(parts, windows)

    return replace(parts, batches=batches)


def on_any(parts: Parts, depth: int = 1) -> Parts:
    if depth < 1:
        raise ValueError(f"prefetch_device: {depth} batches ahead is none: set depth to 1 or more")
    inner = parts.batches

    def batches(parts: Parts, windows: Windows) -> Batches:
        return ahead(inner(parts, reserved("prefetch_device", windows, depth, depth + 1)), depth)

    return replace(parts, batches=batches)


def pinned(parts: Parts, x: Any, y: Any) -> tuple[Any, Any]:
    """Copy a batch to memory that the device can read while the host goes on."""
    import torch

    tensors = (torch.as_tensor(a) for a in (x, y))
    return tuple(a if a.is_cuda else a.pin_memory() for a in tensors)  # type: ignore[return-value]


def streamed(parts: Parts, flow: Batches, depth: int) -> Batches:
    """Copy in a separate stream; make the stream of the step wait for each batch that it receives."""
    import torch

    copying = torch.cuda.Stream()

    def started() -> Iterator[Any]:
        for x, y in flow:
            if x.is_cuda:  # gathered there by the stream of the step, which made it
                copying.wait_stream(torch.cuda.current_stream())
                for each in (x, y):
                    each.record_stream(copying)
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
            tensor.record_stream(stepping)  # or the allocator would reuse it for the next copy too early
        return batch

    for item in ahead(started(), depth):
        batch = arrived(*item)
        del item
        yield batch
        del batch


def holds(extent: Extent, depth: int = 1) -> Holding:
    """Count the batches ahead, beside the one in use."""
    return Holding(batches=depth * extent.batch_bytes)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "prefetch_device", rewrites=("batches",), on={"torch": on_torch, "jax": on_any}, about=__doc__, holds=holds
        )
    ]
