"""What the CPU's libraries take of a layer is what is predicted of them."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.backends import processor
from harness.machine import environment

LAYERS = Path(__file__).parents[1] / "known_bytes" / "layers.py"


@cache
def peaks() -> dict[str, tuple[int, int]]:
    """Return the measured and the predicted peak of each layer, from one process."""
    env = {**os.environ, **environment.PINS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(LAYERS)], env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has another library")
@pytest.mark.parametrize("kind", ["lstm", "bilinear", "attention", "convolution", "types", "reduction", "loss", "heap"])
def test_a_layer_takes_what_is_predicted(kind: str) -> None:
    if kind == "convolution" and processor.is_wide():
        pytest.skip("convolutions were measured with vectors of 256 bits alone")
    of_kind = {name: each for name, each in peaks().items() if kind in name}
    off = {
        name: (measured, predicted)
        for name, (measured, predicted) in of_kind.items()
        if predicted != pytest.approx(measured, rel=0.03, abs=3 << 20)
    }
    assert of_kind and not off
