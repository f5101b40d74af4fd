"""Rotary angles from a table and computed anew: the same numbers, where the inputs are, at positions far out."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import Parts, Place
from harness.contract import place, plugins

LOADED = plugins.load()
DECODER = LOADED.workloads["decoder"]
SHAPE = SimpleNamespace(rotated=8, rotary_base=10_000.0)
LIKE = {"torch": torch.zeros(1), "jax": jnp.zeros(1)}
FAR = (slice(0, 3), slice(131_000, 131_072))


def rotary_of(backend, name, shape=SHAPE, **knobs):
    parts = Parts(shape, Place(backend, "cpu"))
    parts = LOADED.strategies[name].on[backend](parts, **knobs)
    return lambda positions, like=LIKE[backend]: parts.rotary(parts, positions, like)


def due(positions):
    at = np.concatenate([np.arange(each.start, each.stop) for each in positions])
    angles = np.outer(at, 10_000.0 ** -(np.arange(0, 8, 2) / 8))
    return np.cos(angles), np.sin(angles)


@pytest.mark.parametrize("name", ["rope_cache", "rope_on_the_fly"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_angles_are_exact_a_hundred_thousand_tokens_out(backend, name):
    for angle, exact in zip(rotary_of(backend, name)(FAR), due(FAR), strict=True):
        np.testing.assert_allclose(np.asarray(angle), exact, atol=5e-7)


@pytest.mark.parametrize("name", ["rope_cache", "rope_on_the_fly"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_16_bit_inputs_get_angles_in_float32(backend, name):
    half = torch.zeros(1, dtype=torch.bfloat16) if backend == "torch" else jnp.zeros(1, jnp.bfloat16)
    cos, _ = rotary_of(backend, name)((slice(0, 600),), half)
    assert str(cos.dtype).endswith("float32") and len(np.unique(np.asarray(cos)[:, 1])) == 600, (
        "positions do not collide"
    )


@pytest.mark.parametrize("backend", place.NAMES)
def test_they_are_those_of_the_untouched_model(backend):
    parts = DECODER.on[backend](DECODER.shape(width=32, heads=4), Place(backend, "cpu"), None)
    plain = parts.rotary(parts, (slice(7, 40),), LIKE[backend])
    for name, knobs in (("rope_cache", {"tokens": 64}), ("rope_on_the_fly", {})):
        for angle, own in zip(rotary_of(backend, name, **knobs)((slice(7, 40),)), plain, strict=True):
            if backend == "torch" or name == "rope_cache":
                assert np.array_equal(np.asarray(angle), np.asarray(own))
            np.testing.assert_allclose(np.asarray(angle), np.asarray(own), atol=5e-7)


def test_the_table_is_made_once_and_grows_by_doubling():
    rotary = rotary_of("torch", "rope_cache", tokens=100)
    first, _ = rotary((slice(0, 10),))
    storage = first.untyped_storage().nbytes()
    assert storage == 2 * 100 * 4 * 4, "cosines and sines of 100 positions"
    again, _ = rotary((slice(50, 100),))
    assert again.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    grown, _ = rotary((slice(0, 101),))
    assert grown.untyped_storage().nbytes() == 2 * 200 * 4 * 4
    assert torch.equal(grown[:10], first)


@pytest.mark.parametrize("name", ["rope_cache", "rope_on_the_fly"])
def test_angles_lie_where_the_input_is_also_after_growing(name):
    rotary = rotary_of("torch", name)
    for device in ("cpu", "meta"):
        for tokens in (10, 30):
            cos, sin = rotary((slice(0, tokens),), torch.zeros(1, device=device))
            assert cos.device.type == sin.device.type == device and len(cos) == tokens


def test_positions_on_the_cpu_end_the_step_of_another_device_and_only_that():
    """The error that document D saw, from its own line."""
    rotary = rotary_of("torch", "rope_cache", positions_on="cpu")
    cos, _ = rotary((slice(0, 10),))
    assert torch.equal(cos, rotary_of("torch", "rope_cache")((slice(0, 10),))[0])
    with FakeTensorMode(), pytest.raises(RuntimeError, match="found at least two devices"):
        rotary((slice(0, 30),), torch.empty(1, device="meta"))


@pytest.mark.parametrize("backend", place.NAMES)
def test_positions_elsewhere_are_refused(backend):
    with pytest.raises(ValueError, match="'positions_on' is one of inputs, cpu, not 'cuda'"):
        rotary_of(backend, "rope_cache", positions_on="cuda")


def test_nothing_is_kept_when_angles_are_computed_anew():
    rotary = rotary_of("torch", "rope_on_the_fly")
    one, other = rotary((slice(0, 10),)), rotary((slice(0, 10),))
    assert one[0].data_ptr() != other[0].data_ptr() and torch.equal(one[0], other[0])
