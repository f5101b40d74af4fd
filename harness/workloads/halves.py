"""The two halves of a workload, `_torch.py` and `_jax.py` in its folder, imported when one is built."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from harness.contract.parts import Parts
from harness.contract.place import Place

Build = Callable[..., Parts]


def halves(package: str) -> tuple[Build, Build]:
    """Return the functions that build the untouched parts in torch and in JAX: `(shape, place, corpus, seed=0)`."""
    return partial(_build, f"{package}._torch"), partial(_build, f"{package}._jax")


def _build(module: str, shape: Any, place: Place, corpus: Any, seed: int = 0) -> Parts:
    parts: Parts = import_module(module).build(shape, place, corpus, seed)
    return parts
