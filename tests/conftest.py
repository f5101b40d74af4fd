"""One compute thread and quick compiling for what runs inside the tests themselves; workers set their own."""

import os
from collections.abc import Iterator

import pytest

from harness.machine.environment import cache_folder
from harness.run import template

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
# Programs that an earlier run has compiled, by what they compute: with them the tests take a fraction of the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "jax-programs" / "tests"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(scope="session", autouse=True)
def templates() -> Iterator[None]:
    """Fork the workers of all tests from the same few processes."""
    with template.kept():
        yield


@pytest.fixture
def smallest() -> str:
    """The suite that runs in the least time, but for its rounds."""
    return """
title: As small as it gets
workload: decoder
places: [torch/cpu]
corpus: zipf
tokenizer: bytes
shape: {layers: 1, width: 32, heads: 2, vocabulary: 300, batch: 1, tokens: 96}
strategies: [checkpoint]
"""
