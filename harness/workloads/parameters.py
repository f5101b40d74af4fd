"""First values of parameters, from their names and a seed alone, so that every backend starts from the same ones."""

import hashlib
from typing import Any

import numpy as np


def normal(name: str, shape: tuple[int, ...], deviation: float, seed: int) -> Any:
    """Draw float32 [shape] from a normal distribution; deviation 0 gives ones, a negative one zeros."""
    if deviation == 0:
        return np.ones(shape, np.float32)
    if deviation < 0:
        return np.zeros(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    return values
