"""Checkpointing runs each block twice, keeps less, and changes nothing."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import torch

from harness import Parts, Place, backends
from harness.backends import jax as on_jax
from harness.contract import place, plugins
from harness.workloads.decoder import Shape

LOADED = plugins.load()
CHECKPOINT, DECODER = LOADED.strategies["checkpoint"], LOADED.workloads["decoder"]
LAYERS = 5
SHAPE = Shape(layers=LAYERS, width=32, heads=2, hidden=48, vocabulary=31, batch=2, tokens=16)
# Deep, and with a row long enough that the activations outweigh the parameters.
DEEP = Shape(layers=8, width=32, heads=2, hidden=128, vocabulary=32, tokens=512)
EVERY = [1, 2, 3, LAYERS, LAYERS + 4]


def parts_of(backend, shape, every=None):
    parts = DECODER.on[backend](shape, Place(backend, "cpu"), None, 0)
    return parts if every is None else CHECKPOINT.on[backend](parts, every=every)


def first_gradient(parts):
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    grad = jax.jit(partial(parts.grad, parts)) if parts.place.backend == "jax" else partial(parts.grad, parts)
    return grad(state, x, y)


@pytest.mark.parametrize("every", EVERY)
def test_torch_gives_the_same_bits_and_runs_each_block_twice(every):
    loss, grads = first_gradient(parts_of("torch", SHAPE))
    parts = parts_of("torch", SHAPE, every)
    ran = []

    def counting(inner, parts, p, x):
        ran.append(id(p))
        return inner(parts, p, x)

    inner = parts.block
    actual, found_grads = first_gradient(replace(parts, block=lambda *args: counting(inner, *args)))
    assert len(ran) == 2 * LAYERS
    assert all(ran.count(layer) == 2 for layer in ran)
    assert torch.equal(actual, loss)
    module = backends.load("torch")
    answer, reference = module.arrays(found_grads), module.arrays(grads)
    assert all(np.array_equal(answer[name][0], reference[name][0]) for name in reference)


@pytest.mark.parametrize(("layers", "segments"), [(1, [1]), (4, [2, 2]), (5, [3, 2]), (9, [3, 3, 3]), (10, [4, 4, 2])])
def test_a_segment_has_the_root_of_the_layers_where_no_number_is_set(layers, segments):
    ran = []

    def stack(parts, ps, x_BTD):
        ran.append(len(ps))
        return x_BTD

    parts = CHECKPOINT.on["torch"](Parts(None, Place("torch", "cpu"), stack=stack), every=0)
    parts.stack(parts, [{}] * layers, torch.zeros(1))
    assert ran == segments


@pytest.fixture(scope="module")
def gradient_in_jax():
    return first_gradient(parts_of("jax", SHAPE))


@pytest.mark.parametrize("every", [1, 3, LAYERS + 4])
def test_jax_gives_the_same_gradients(every, gradient_in_jax):
    loss, grads = gradient_in_jax
    actual, found_grads = first_gradient(parts_of("jax", SHAPE, every))
    assert float(actual) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found_grads, grads)


def activations(backend, every=None):
    """Bytes of a step above what lasts from one step to the next."""
    if backend == "jax":
        parts = parts_of("jax", DEEP, every)
        batch = on_jax.like(DECODER.abstract_batch(DEEP))
        return on_jax.lowered(parts, batch, parts).compile().memory_analysis().temp_size_in_bytes
    peaks = (
        backends.load("torch")
        .predict(
            lambda: parts_of("torch", DEEP, every),
            Place("torch", "cpu"),
            DECODER.abstract_batch(DEEP),
            source_bytes=0,
            steps=1,
        )
        .peaks
    )
    return peaks["first_step/backward"] - peaks["init"]


@pytest.fixture(scope="module", params=place.NAMES)
def saved(request):
    return {every: activations(request.param, every) for every in (None, 1, 3, 8)}


@pytest.mark.long_in_jax
def test_checkpointing_each_block_keeps_less(saved):
    assert saved[1] < 0.5 * saved[None]


def test_a_short_segment_lies_between(saved):
    assert saved[3] < 0.75 * saved[None]


def test_one_segment_over_the_whole_stack_saves_nothing(saved):
    assert saved[8] >= 0.95 * saved[None]


def test_what_is_saved_for_the_backward_pass_falls_in_torch():
    """Nothing but the graph outside the segments is saved: hooks see no tensor of a block."""

    def saved(every):
        seen = {}

        def pack(tensor):
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        parts = parts_of("torch", DEEP, every)
        params = parts.init(parts, None)["params"]
        own = {leaf.untyped_storage()._cdata for p in params["layers"] for leaf in p.values()}
        x = torch.randn(1, DEEP.tokens, DEEP.width)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = parts.stack(parts, params["layers"], x)
        assert y.requires_grad
        return sum(size for key, size in seen.items() if key not in own)

    plain = saved(None)
    assert plain > DEEP.layers * 4 * DEEP.tokens * DEEP.width * 4
    assert saved(1) < 0.1 * plain
