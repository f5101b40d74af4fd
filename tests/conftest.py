"""One compute thread and quick compiling for what runs inside the tests themselves; workers set their own."""

import os

import pytest

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")


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
