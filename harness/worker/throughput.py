"""Measure what this machine does in a second: `python -m harness.worker.throughput BACKEND DEVICE`.

Products of square matrices in each dtype, and the bytes that a sum of two arrays reads and writes. The arrays are far
larger than the caches, and random: a GPU multiplies ones by a tenth faster, as fewer of its bits flip. Each figure is
the best of several turns, since what disturbs only ever slows down.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import backends
from harness.contract.place import Place

DTYPES = ("float32", "bfloat16", "float16")
SIDE = {"cpu": 1024, "cuda": 8192}
LENGTH = {"cpu": 1 << 24, "cuda": 1 << 28}
TURNS = 5
LIMIT = 2.0
"""Seconds that one kind may take: 16 bit on a processor without instructions for it is slow beyond use."""


def measured(place: Place) -> dict[str, Any]:
    """Return `flops` by dtype and `bandwidth`, both for one second."""
    backend = backends.load(place.backend)
    backend.start(place)
    side, length = SIDE[place.device], LENGTH[place.device]

    def seconds(shape: tuple[int, ...], dtype: str, what: str) -> float:
        operation, arrays = WAYS[place.backend](place, shape, dtype, what)
        return fastest(lambda: backend.wait(operation(*arrays)))

    flops = {dtype: 2.0 * side**3 / seconds((side, side), dtype, "product") for dtype in DTYPES}
    return {"flops": flops, "bandwidth": 3 * 4 * length / seconds((length,), "float32", "sum")}


def fastest(turn: Callable[[], Any]) -> float:
    """Return the seconds of the fastest turn, the first one apart."""
    begun = time.perf_counter()
    turn()
    times: list[float] = []
    while not times or (len(times) < TURNS and time.perf_counter() - begun < LIMIT):
        started = time.perf_counter()
        turn()
        times.append(time.perf_counter() - started)
    return min(times)


def on_torch(place: Place, shape: tuple[int, ...], dtype: str, what: str) -> tuple[Callable[..., Any], list[Any]]:
    import torch

    arrays = [torch.randn(shape, dtype=getattr(torch, dtype), device=place.device) for _ in range(3)]
    operation: Any = torch.mm if what == "product" else torch.add
    return lambda a, b, out: operation(a, b, out=out), arrays


def on_jax(place: Place, shape: tuple[int, ...], dtype: str, what: str) -> tuple[Callable[..., Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    device = jax.devices("gpu" if place.device == "cuda" else place.device)[0]
    with jax.default_device(device):
        arrays = [jax.random.normal(jax.random.key(number), shape, dtype) for number in range(2)]
    return jax.jit(jnp.matmul if what == "product" else jnp.add), arrays


WAYS = {"torch": on_torch, "jax": on_jax}

if __name__ == "__main__":
    print(json.dumps(measured(Place(sys.argv[1], sys.argv[2]))))
