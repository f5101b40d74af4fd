"""Keep keys and values in the host's page-locked memory and fetch the next layer while one is used; pay the bus.

Peak on the device: 2 kv / L, two layers in turn; on the host kv. The copy of a layer starts when the layer before it is
needed, on a stream of its own, and overlaps with that layer's work. New keys and values are written to both sides, so
that no copy waits for another. OffloadedCache in transformers works in the same way. torch only: a compiled JAX step
has no streams to order. On a CPU it stands in for a run on a GPU: both sides are in one memory, and nothing overlaps.
"""

from dataclasses import replace
from typing import Any

from harness import Parts, Strategy, hookimpl
from strategies.cache.preallocated_cache import within

STAND_IN = "stands in for a GPU: a CPU has one memory, so that its peak has both sides"


def on_torch(parts: Parts) -> Parts:
    import torch

    def cache(parts: Parts, batch: int, tokens: int, like: Any) -> Any:
        shape = parts.shape
        if parts.place.device == "cpu":
            parts.notes["offloading"] = STAND_IN
        size = (tokens, 2, batch, shape.key_heads, shape.head)  # tokens first, so that the filled part is one piece
        pinned = parts.place.device != "cpu"

        def empty() -> Any:
            return {
                "host": [torch.empty(size, dtype=like.dtype, pin_memory=pinned) for _ in range(shape.layers)],
                "device": [torch.empty(size, dtype=like.dtype, device=like.device) for _ in range(2)],
                "stream": torch.cuda.Stream() if like.is_cuda else None,
            }

        def fetch(state: Any, layer: int, end: int) -> None:
            """Copy a layer to the device beside the work there, but not before the layer in its place is done."""
            if state["stream"] is None:
                return copy(state, layer, end)
            state["stream"].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(state["stream"]):
                copy(state, layer, end)

        def copy(state: Any, layer: int, end: int) -> None:
            state["device"][layer % 2][:end].copy_(state["host"][layer][:end], non_blocking=True)

        def append(state: Any, layer: int, position: int, k_BTGK: Any, v_BTGK: Any) -> Any:
            end = within(position + k_BTGK.shape[1], tokens)
            if layer == 0:
                fetch(state, 0, position)
            if state["stream"] is not None:
                torch.cuda.current_stream().wait_stream(state["stream"])
            here = state["device"][layer % 2]
            for index, new in enumerate((k_BTGK, v_BTGK)):
                here[position:end, index].copy_(new.transpose(0, 1))
            state["host"][layer][position:end].copy_(here[position:end], non_blocking=True)
            if layer + 1 < shape.layers:
                fetch(state, layer + 1, position)
            k, v = here[:end].transpose(0, 1).transpose(1, 2).unbind(0)
            return state, k, v, None

        return empty, append

    return replace(parts, cache=cache)


@hookimpl
def harness_strategies() -> list[Strategy]:
    return [
        Strategy(
            "offloaded_cache",
            rewrites=("cache",),
            on={"torch": on_torch},
            about=__doc__,
        )
    ]
