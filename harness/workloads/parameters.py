"""First values of parameters, from their names and a seed alone, so that every backend starts from the same ones."""

import hashlib
import math
from typing import Any

import numpy as np

from harness.contract.place import Place

LARGE = 1 << 24
"""Elements above which a parameter is drawn on its GPU: one thread of the host draws 100 million in a second."""


def normal(name: str, shape: tuple[int, ...], deviation: float, seed: int) -> Any:
    """Draw float32 [shape] from a normal distribution; deviation 0 gives ones, a negative one zeros."""
    if deviation == 0:
        return np.ones(shape, np.float32)
    if deviation < 0:
        return np.zeros(shape, np.float32)
    values = np.random.Generator(np.random.Philox(key=key(name, seed))).standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    return values


def key(name: str, seed: int) -> int:
    """Return 64 bits that are a parameter's own, for a generator."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def on_device(place: Place, shape: tuple[int, ...], deviation: float) -> bool:
    """Check whether a parameter is so large that its GPU draws it; its values are then those of the framework."""
    return place.device == "cuda" and deviation > 0 and math.prod(shape) > LARGE
