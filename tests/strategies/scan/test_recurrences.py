"""An LSTM and a GRU in chunks give what the whole row gives; truncated, they lack what passes a border and no more."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from harness import IGNORED, Place, backends, tree
from harness.backends import jax as on_jax
from harness.contract import place, plugins
from strategies.scan.chunked_recurrence import lengths

LOADED = plugins.load()
TEMPORAL = LOADED.workloads["temporal"]
NETWORKS = ["lstm", "gru"]


def parts_of(backend, shape, *strategies):
    parts = TEMPORAL.on[backend](shape, Place(backend, "cpu"), None, 0)
    for name, knobs in strategies:
        parts = LOADED.strategies[name].on[backend](parts, **knobs)
    return parts


def probe(network):
    return TEMPORAL.probe(TEMPORAL.shape(network=network))


def gradient(parts):
    """Loss and gradients of the first batch, by name, in numpy."""
    state = parts.init(parts, None)
    x, y = next(parts.batches(parts, parts.windows(parts, parts.source(parts))))
    grad = jax.jit(partial(parts.grad, parts)) if parts.place.backend == "jax" else partial(parts.grad, parts)
    loss, grads = grad(state, x, y)
    return float(loss), {name: array for name, (array, _) in backends.load(parts.place.backend).arrays(grads).items()}


@cache
def plain(backend, network):
    return gradient(parts_of(backend, probe(network)))


@pytest.mark.parametrize(
    ("steps", "chunk", "due"),
    [(13, 5, [3, 5, 5]), (10, 5, [5, 5]), (4, 9, [4]), (1, 1, [1]), (13, 0, [1, 4, 4, 4]), (3, 1, [1, 1, 1])],
)
def test_the_first_chunk_is_the_shorter_one(steps, chunk, due):
    assert lengths(steps, chunk) == due


def test_a_chunk_of_less_than_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk is -1 steps: give at least 1, or 0"):
        lengths(4, -1)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("chunk", [1, 5, 13, 64, 0])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", place.NAMES)
def test_chunks_give_the_gradient_of_the_whole_row(backend, network, chunk):
    if backend == "jax" and chunk in (1, 64):
        pytest.skip("compiled for the other sizes")
    loss, grads = gradient(parts_of(backend, probe(network), ("chunked_recurrence", {"chunk": chunk})))
    due_loss, due = plain(backend, network)
    assert loss == pytest.approx(due_loss, rel=1e-6)
    for name, value in due.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


# Truncated


def cut_at_borders(network, steps):
    """Parts of torch that run the whole row in one graph, whose states lose their history at the borders."""
    shape = probe(network)
    parts = parts_of("torch", shape)
    inner = parts.recur

    def recur(parts, p, x_BTD, carried):
        ys = []
        for x_BCD in x_BTD.split(lengths(x_BTD.shape[1], steps), 1):
            y_BCD, carried = inner(parts, p, x_BCD, carried)
            carried = tree.mapped(torch.Tensor.detach, carried)
            ys.append(y_BCD)
        return torch.cat(ys, 1), carried

    return replace(parts, recur=recur)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", place.NAMES)
def test_truncated_is_the_gradient_with_states_cut_at_the_borders(backend, network, stacked):
    loss, grads = gradient(parts_of(backend, probe(network), ("truncated_bptt", {"steps": 5})))
    due_loss, due = gradient(cut_at_borders(network, 5))
    due = due if backend == "torch" else stacked(due)
    assert loss == pytest.approx(due_loss, rel=1e-6)
    assert loss == pytest.approx(plain(backend, network)[0], rel=1e-6), "only the gradient is cut"
    for name, value in due.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-3, atol=1e-5 * np.abs(value).max(), err_msg=name)
    recurrent = "layers.0.wh" if backend == "torch" else "layers.wh"
    whole = plain(backend, network)[1][recurrent]
    assert np.abs(grads[recurrent] - whole).max() > 1e-3 * np.abs(whole).max()


def hidden(parts, frames):
    """Parts whose gradient ignores the targets of some frames."""
    inner = parts.grad

    def grad(parts, state, x, y):
        if parts.place.backend == "jax":
            return inner(parts, state, x, jnp.asarray(y).at[:, frames].set(IGNORED))
        y = y.clone()
        y[:, frames] = IGNORED
        return inner(parts, state, x, y)

    return replace(parts, grad=grad)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("frames", [slice(3), slice(3, 8), slice(2, 12)], ids=["first", "second", "two"])
@pytest.mark.parametrize("backend", place.NAMES)
def test_a_segment_without_a_target_adds_nothing(backend, frames, stacked):
    """The segments are frames 0 to 3, 3 to 8 and 8 to 13."""
    loss, grads = gradient(hidden(parts_of(backend, probe("gru"), ("truncated_bptt", {"steps": 5})), frames))
    due_loss, due = gradient(hidden(cut_at_borders("gru", 5), frames))
    assert loss == pytest.approx(due_loss, rel=1e-6)
    for name, value in (due if backend == "torch" else stacked(due)).items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-3, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_row_without_a_target_has_no_loss_and_no_gradient(backend):
    parts = parts_of(backend, probe("gru"), ("truncated_bptt", {"steps": 5}))
    loss, grads = gradient(hidden(parts, slice(None)))
    assert np.isnan(loss) and not any(value.any() for value in grads.values())


@pytest.mark.parametrize("backend", place.NAMES)
def test_one_segment_is_the_plain_gradient(backend):
    loss, grads = gradient(parts_of(backend, probe("gru"), ("truncated_bptt", {"steps": 13})))
    due_loss, due = plain(backend, "gru")
    assert loss == pytest.approx(due_loss, rel=1e-6)
    for name, value in due.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_truncated_goes_with_recomputed_layers():
    _, grads = gradient(parts_of("torch", probe("lstm"), ("checkpoint", {}), ("truncated_bptt", {"steps": 5})))
    _, due = gradient(parts_of("torch", probe("lstm"), ("truncated_bptt", {"steps": 5})))
    assert all(np.array_equal(grads[name], due[name]) for name in due)


def test_pieces_of_rows_each_carry_their_own_states():
    cut = ("truncated_bptt", {"steps": 5})
    loss, grads = gradient(parts_of("torch", probe("lstm"), cut, ("accumulate", {"pieces": 3})))
    due_loss, due = gradient(parts_of("torch", probe("lstm"), cut))
    assert loss == pytest.approx(due_loss, rel=1e-6)
    for name, value in due.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(("precision", "network"), [("float32_master", "lstm"), ("float16_scaled", "gru")])
def test_narrow_layers_of_jax_begin_with_the_states_of_wide_ones(precision, network):
    loss, _ = gradient(parts_of("jax", probe(network), (precision, {}), ("truncated_bptt", {"steps": 5})))
    assert loss == pytest.approx(plain("jax", network)[0], rel=1e-2)


@pytest.mark.long_in_jax
@pytest.mark.parametrize("backend", place.NAMES)
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_truncated_goes_with_adapters(backend, adapter):
    named = (adapter, {"rank": 2})
    loss, grads = gradient(parts_of(backend, probe("lstm"), named, ("truncated_bptt", {"steps": 5})))
    due_loss, due = gradient(parts_of(backend, probe("lstm"), named))
    assert loss == pytest.approx(due_loss, rel=1e-6)
    assert grads.keys() == due.keys() and all(".adapters." in name for name in grads)
    assert all(np.abs(grads[name]).max() > 0 for name in grads if name.endswith(".b"))


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_network_without_a_recurrence_is_refused(backend):
    with pytest.raises(ValueError, match="this network has none"):
        gradient(parts_of(backend, probe("mamba"), ("truncated_bptt", {"steps": 5})))


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_segment_without_steps_is_refused(backend):
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        parts_of(backend, probe("gru"), ("truncated_bptt", {"steps": 0}))


# Memory


@cache
def activations(backend, name=None, knobs=()):
    """Predicted bytes of a step above what lasts from one step to the next."""
    shape = TEMPORAL.shape(network="lstm", window=256, batch=16, width=32, features=8, frames=600)
    parts = partial(parts_of, backend, shape, *([(name, dict(knobs))] if name else []))
    batch = TEMPORAL.abstract_batch(shape)
    if backend == "jax":
        built = parts()
        return on_jax.lowered(built, on_jax.like(batch), built).compile().memory_analysis().temp_size_in_bytes
    peaks = backends.load("torch").predict(parts, Place("torch", "cpu"), batch, source_bytes=0, steps=1).peaks
    return peaks["first_step/backward"] - peaks["init"]


@pytest.mark.parametrize("backend", place.NAMES)
def test_chunks_keep_the_gates_of_one_chunk(backend):
    assert activations(backend, "chunked_recurrence") < 0.9 * activations(backend)


@pytest.mark.parametrize("backend", place.NAMES)
def test_a_segment_keeps_its_own_frames_alone(backend):
    assert activations(backend, "truncated_bptt", (("steps", 16),)) < 0.3 * activations(backend)
