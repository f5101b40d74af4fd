"""A scan in steps or in chunks gives the states and gradients of the parallel one, and holds less for them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import Place, backends
from harness.backends import torch_graph
from harness.backends.torch_storage import LiveStorage
from harness.contract import place, plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case
from harness.worker import numerics

LOADED = plugins.load()
TEMPORAL = LOADED.workloads["temporal"]
SHAPE = TEMPORAL.shape(network="mamba")
WAYS = [("sequential_scan", {}), *(("chunked_scan", {"chunk": chunk}) for chunk in (1, 5, 9, 64))]
IDS = ["sequential", *(f"chunks of {knobs['chunk']}" for _, knobs in WAYS[1:])]


def parts_of(backend, name=None, **knobs):
    parts = TEMPORAL.on[backend](SHAPE, Place(backend, "cpu"), None, 0)
    return LOADED.strategies[name].on[backend](parts, **knobs) if name else parts


def rows(T, dtype=np.float64, strength=1.0):
    """Inputs of a scan [2, T, 3] with 4 states, and what its outputs are weighed with."""
    random = np.random.Generator(np.random.Philox(key=T))
    x, b, c, weights = (random.standard_normal((2, T, n)) for n in (3, 4, 4, 3))
    delta, a = strength * random.random((2, T, 3)), -np.exp(random.standard_normal((3, 4)))
    return [array.astype(dtype) for array in (x, delta, a, b, c, weights)]


def answer(parts, inputs):
    """The outputs of a scan and the gradient of their weighed sum for each of its inputs."""
    *inputs, weights = inputs
    if parts.place.backend == "torch":
        tensors = [torch.from_numpy(array).requires_grad_() for array in inputs]
        y = parts.scan(parts, *tensors)
        grads = torch.autograd.grad((y * torch.from_numpy(weights)).sum(), tensors)
        return [y.detach().numpy(), *(grad.numpy() for grad in grads)]

    def weighed(*inputs):
        y = parts.scan(parts, *inputs)
        return (y * weights).sum(), y

    with jax.enable_x64(True):
        grads, y = jax.jit(jax.grad(weighed, argnums=range(5), has_aux=True))(*map(jnp.asarray, inputs))
        return [np.asarray(array) for array in (y, *grads)]


@cache
def parallel(backend, T):
    return answer(parts_of(backend), rows(T))


@pytest.mark.parametrize(("name", "knobs"), WAYS, ids=IDS)
@pytest.mark.parametrize("T", [1, 27])
@pytest.mark.parametrize("backend", place.NAMES)
def test_values_and_gradients_are_those_of_the_parallel_form(backend, T, name, knobs):
    result = answer(parts_of(backend, name, **knobs), rows(T))
    for actual, expected in zip(result, parallel(backend, T), strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "knobs"), [WAYS[0], WAYS[2]], ids=[IDS[0], IDS[2]])
@pytest.mark.parametrize("backend", place.NAMES)
def test_the_last_output_depends_on_the_first_frame_across_all_borders(backend, name, knobs):
    x, delta, a, b, c, weights = rows(27, strength=0.01)
    weights[:, :-1] = 0
    of_x = answer(parts_of(backend, name, **knobs), (x, delta, a, b, c, weights))[1]
    assert (np.abs(of_x) > 1e-6).all()


@pytest.mark.parametrize("name", ["sequential_scan", "chunked_scan"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_strong_decays_stay_finite_over_thousands_of_frames(backend, name):
    result = answer(parts_of(backend, name), rows(2050, np.float32, strength=1e3))
    assert all(np.isfinite(array).all() for array in result)
    assert all(array.dtype == np.float32 for array in result)


@pytest.mark.parametrize("name", ["sequential_scan", "chunked_scan"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_states_are_float32_under_bfloat16(backend, name):
    """A state that gains 0.001 in each of 600 frames would stand still in 8 bits."""
    x, delta, a = np.ones((1, 600, 2)), np.full((1, 600, 2), 1e-3), np.full((2, 1), -1e-6)
    b = np.ones((1, 600, 1))
    parts = parts_of(backend, name)
    if backend == "torch":
        low = [torch.from_numpy(array).bfloat16() for array in (x, b, b)]
        y = parts.scan(parts, low[0], torch.from_numpy(delta).float(), torch.from_numpy(a).float(), *low[1:])
        assert y.dtype == torch.bfloat16
        y = y.float().numpy()
    else:
        low = [jnp.asarray(array, jnp.bfloat16) for array in (x, b, b)]
        y = parts.scan(parts, low[0], jnp.asarray(delta, jnp.float32), jnp.asarray(a, jnp.float32), *low[1:])
        assert y.dtype == jnp.bfloat16
        y = np.asarray(y.astype(jnp.float32))
    due = np.arange(1, 601)[None, :, None] * 1e-3
    np.testing.assert_allclose(y, np.broadcast_to(due, y.shape), rtol=2**-8)


@cache
def outcome(backend, name=None):
    """A Mamba trained for four steps through the assembly, at the probe."""
    applied = () if name is None else (Applied(name=name, knobs=dict(LOADED.strategies[name].probe)),)
    case = Case(
        workload="temporal",
        shape=TEMPORAL.probe(SHAPE).model_dump(),
        place=f"{backend}/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=applied,
    )
    module = backends.load(backend)
    assert assemble(LOADED, case).shape.window % 5, "the last chunk must be a part of one"
    return numerics.observer(LOADED, case, module, updates=4)(0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sequential_scan", "chunked_scan"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_mamba_is_trained_as_with_the_parallel_form(backend, name):
    actual, expected = outcome(backend, name), outcome(backend)
    assert actual.trajectory == pytest.approx(expected.trajectory, rel=1e-5)
    for key, value in expected.gradients.items():
        np.testing.assert_allclose(
            actual.gradients[key], value, rtol=1e-3, atol=1e-5 * np.abs(value).max(), err_msg=key
        )


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_chunk_without_steps_is_refused(backend):
    with pytest.raises(ValueError, match="chunk must be at least 1 step, not 0"):
        parts_of(backend, "chunked_scan", chunk=0)


# Memory, in units of B T E S values: all states once

B, T, E, S = 2, 1024, 16, 16
SIZES = [(B, T, E), (B, T, E), (E, S), (B, T, S), (B, T, S)]


@cache
def taken(backend, name=None):
    """The most that tensors of a scan and its gradient hold at once, above the inputs; autograd's graph is apart."""
    parts, unit = parts_of(backend, name), B * T * E * S * 4
    if backend == "jax":
        grad = jax.grad(lambda *inputs: parts.scan(parts, *inputs).sum(), argnums=range(5))
        compiled = jax.jit(grad).lower(*(jax.ShapeDtypeStruct(size, jnp.float32) for size in SIZES)).compile()
        return compiled.memory_analysis().temp_size_in_bytes / unit
    with pytest.MonkeyPatch.context() as patch, LiveStorage() as live:
        patch.setattr(torch_graph, "NODE", 0)
        inputs = [torch.zeros(size).requires_grad_() for size in SIZES]
        before = live.live
        live.enter("scan")
        torch.autograd.grad(parts.scan(parts, *inputs).sum(), inputs)
        return (live.peaks["scan"] - before) / unit


@pytest.mark.parametrize("backend", place.NAMES)
def test_the_parallel_form_holds_several_times_all_states(backend):
    assert 6 < taken(backend) < 16


@pytest.mark.parametrize("backend", place.NAMES)
def test_steps_hold_what_the_backward_pass_needs_of_each(backend):
    assert 2 < taken(backend, "sequential_scan") < taken(backend) / 3


@pytest.mark.parametrize("backend", place.NAMES)
def test_chunks_hold_the_states_of_one_chunk_and_of_the_borders(backend):
    assert taken(backend, "chunked_scan") < 0.8 < taken(backend, "sequential_scan") / 2
